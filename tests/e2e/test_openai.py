"""The official client, unchanged, against real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from sash.bench.serving.client import Address

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(600)]
QUESTION: Any = [
    {"role": "system", "content": "Answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
GREEDY: Any = {"temperature": 0, "max_tokens": 24}


Connect = Callable[..., openai.OpenAI]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients that are closed afterwards."""
    with ExitStack() as stack:
        yield lambda address, **options: stack.enter_context(
            openai.OpenAI(base_url=f"{address.url}/v1", api_key="none", max_retries=0, **options)
        )


def test_completions_of_every_kind_of_prompt(gemma: Address, connect: Connect) -> None:
    api = connect(gemma).completions
    text = "The capital of France is"
    ids = [2, 818, 5279, 529, 7001, 563]
    whole = api.create(model="gemma3-270m", prompt=text, **GREEDY)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 24)  # type: ignore[union-attr]
    assert whole.choices[0].finish_reason == "length" and whole.model == "gemma3-270m"
    assert api.create(model="gemma3-270m", prompt=ids, **GREEDY).choices[0].text == whole.choices[0].text
    many = api.create(model="gemma3-270m", prompt=[text, "Water boils at"], n=2, seed=5, max_tokens=8)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    again = api.create(model="gemma3-270m", prompt=[text, "Water boils at"], n=2, seed=5, max_tokens=8)
    assert [c.text for c in many.choices] == [c.text for c in again.choices]
    echoed = api.create(model="gemma3-270m", prompt=text, echo=True, logprobs=2, **GREEDY)
    scores = echoed.choices[0].logprobs
    assert scores is not None and scores.tokens is not None and scores.token_logprobs is not None
    assert echoed.choices[0].text == text + whole.choices[0].text
    assert len(scores.tokens) == len(ids) + 24 and scores.token_logprobs[0] is None


def test_a_streamed_completion_is_the_whole_one(gemma: Address, connect: Connect) -> None:
    api = connect(gemma).completions
    body: Any = {"model": "gemma3-270m", "prompt": "Die Hauptstadt von Österreich ist", **GREEDY}
    whole = api.create(**body)
    chunks = list(api.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage and len(chunks) > 10
    stopped = api.create(**body, stop=["\n"])
    assert "\n" not in stopped.choices[0].text


def test_chat_whole_streamed_and_scored(smollm2: Address, connect: Connect) -> None:
    api = connect(smollm2).chat.completions
    whole = api.create(model="smollm2-135m", messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and "Paris" in (choice.message.content or "")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode()
    assert spelled.removesuffix("<|im_end|>") == choice.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    with api.stream(model="smollm2-135m", messages=QUESTION, **GREEDY) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == choice.message.content
    assert final.choices[0].finish_reason == choice.finish_reason == "stop"


def test_many_at_once(smollm2: Address) -> None:
    async def whole() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key="none") as api:

            async def one() -> str:
                stream = await api.chat.completions.create(
                    model="smollm2-135m", messages=QUESTION, stream=True, **GREEDY
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

            return list(await asyncio.gather(*(one() for _ in range(16))))

    answers = asyncio.run(whole())
    assert len(answers) == 16 and all("Paris" in (answer or "") for answer in answers)


def test_errors_are_the_client_s_own(smollm2: Address, connect: Connect) -> None:
    api = connect(smollm2).chat.completions
    with pytest.raises(openai.BadRequestError) as bad:
        api.create(model="smollm2-135m", messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="other"):
        api.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError):
        api.create(model="smollm2-135m", messages=[{"role": "user", "content": "word " * 5000}])
    impatient = connect(smollm2, timeout=0.2).completions
    with pytest.raises(openai.APITimeoutError):
        impatient.create(model="smollm2-135m", prompt="Hello", max_tokens=1000, extra_body={"ignore_eos": True})
    assert api.create(model="smollm2-135m", messages=QUESTION, **GREEDY).choices[0].message.content


class City(BaseModel):
    name: str = Field(max_length=12)
    large: bool


def test_an_answer_that_fits_a_schema(smollm2: Address, connect: Connect) -> None:
    answer = connect(smollm2).chat.completions.parse(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Describe Paris as JSON with name and large."}],
        response_format=City,
        temperature=0,
        max_tokens=60,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City) and parsed.large in (True, False) and answer.choices[0].finish_reason == "stop"
    plain = connect(smollm2).chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "An empty JSON object."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )
    if plain.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


def test_a_tool_is_called_whole_and_streamed(smollm2: Address, connect: Connect) -> None:
    body: Any = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
        "max_tokens": 60,
    }
    api = connect(smollm2).chat.completions
    calls = api.create(**body).choices[0].message.tool_calls
    assert calls is not None and calls[0].type == "function"
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["place"] in ("Paris", "Rome")
    with api.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None and streamed[0].function.arguments == calls[0].function.arguments
    answer = api.create(
        model="smollm2-135m",
        messages=[
            *body["messages"],
            {"role": "assistant", "tool_calls": [calls[0].model_dump()]},
            {"role": "tool", "tool_call_id": calls[0].id, "content": "Sunny, 25 degrees."},
        ],
        tools=[TOOL],
        **GREEDY,
    )
    assert answer.choices[0].message.content is not None or answer.choices[0].message.tool_calls
