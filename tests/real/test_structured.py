"""Structured output of the real models: SentencePiece and byte-level vocabularies, and words across tokens."""

from __future__ import annotations

import json

import jsonschema
import pytest

from sash import LLM, SamplingParams
from sash.spec.structured import StructuredOutputs

pytestmark = pytest.mark.real

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["kind", "smart", "très élégant", "日本"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", ["gemma", "smollm2"])
def test_answers_fit_the_schema_at_any_temperature(model: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(model)
    form = StructuredOutputs(json=SCHEMA)
    params = [
        SamplingParams(temperature=1.5 * (seed > 0), seed=seed, max_tokens=150, structured_outputs=form)
        for seed in range(6)
    ]
    complete = 0
    for output in llm.generate(["A person as JSON: "] * 6, params):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            continue
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        complete += 1
    assert complete >= 4


@pytest.mark.parametrize("model", ["gemma", "smollm2"])
def test_text_outside_ascii_is_put_together_from_bytes(model: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(model)
    choice = ["très élégant 🙂", "日本の𠮷", "naïve\tcafé"]
    form = StructuredOutputs(choice=choice)
    params = [SamplingParams(seed=seed, max_tokens=60, structured_outputs=form) for seed in range(8)]
    outputs = [output.outputs[0] for output in llm.generate(["Say: "] * 8, params)]
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert {output.text for output in outputs} <= {*choice}


def test_greedy_answers_know_what_they_say(smollm2: LLM) -> None:
    """The form is forced, the content is the model's."""
    question = [{"role": "user", "content": "What is the capital of France? Answer as JSON with the key city."}]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputs(json=schema))
    answer = smollm2.chat(question, params).outputs[0]
    assert answer.finish_reason == "stop" and json.loads(answer.text)["city"] == "Paris"
