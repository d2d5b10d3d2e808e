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


def test_gemma_without_a_template_is_refused_with_the_fix(gemma: LLM) -> None:
    fix = "the model has no chat template; use sash generate, or pass --chat-template FILE"
    with pytest.raises(ModelError, match=fix):
        gemma.chat([QUESTION])
    result = CliRunner().invoke(app, ["chat", "gemma3-270m"], input="Hello\n", obj=lambda *_: gemma)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fix in result.stderr
