"""The real models in a conversation."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sash import LLM, SamplingParams
from sash.cli.main import app
from sash.spec.errors import ModelError

pytestmark = pytest.mark.real

QUESTION = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}


def test_smollm2_answers_a_question_and_ends_by_itself(smollm2: LLM) -> None:
    answer = smollm2.chat([QUESTION], SamplingParams(max_tokens=60, temperature=0)).outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_" not in answer.text


def test_gemma_has_no_template_and_talks_in_lines(gemma: LLM) -> None:
    with pytest.raises(ModelError, match=r"the model has no chat template: give LLM\.chat_prompt one"):
        gemma.chat([QUESTION])
    said = ["chat", "gemma3-270m", "--temperature", "0", "--max-tokens", "60"]
    result = CliRunner().invoke(app, said, input="Hello, who are you?\n", obj=lambda *_: gemma)
    assert result.exit_code == 0 and result.stdout.strip()
    assert "user:" not in result.stdout
