"""The real models continue as transformers does on the dequantised weights, in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.real.oracle import (
    FIXTURES,
    assert_continues,
    assert_teacher_forced,
    cases,
    continue_and_compare,
    greedy,
)
from tests.real_models import real_model

from sash import LLM, RequestOutput

pytestmark = pytest.mark.real

GEMMA, SMOLLM2 = cases("gemma3-270m"), cases("smollm2-135m")
# The command line's prompt is answered there.
TWENTY = [case for name, case in GEMMA.items() if name != "capital"]
CHAT = SMOLLM2["chat-france"]
# Two short ones, one that passes the window while it decodes, one longer than the window.
QUICK = [GEMMA[name] for name in ("prose-10", "code", "topics-400", "list-1100")]


def test_four_prompts_in_a_batch_continue_as_the_oracle_does(gemma: LLM) -> None:
    assert len(QUICK[2].ids) < 512 < len(QUICK[2].ids) + len(QUICK[2].tokens)
    continue_and_compare(gemma, QUICK)


@pytest.fixture(scope="module")
def chat_request(smollm2: LLM) -> RequestOutput:
    return smollm2.generate([CHAT.ids], greedy(len(CHAT.tokens)))[0]


def test_smollm2_continues_a_chat_as_the_oracle_does(smollm2: LLM, chat_request: RequestOutput) -> None:
    assert_continues(smollm2, CHAT, chat_request)
    assert_teacher_forced(smollm2, CHAT)


def test_a_wrong_answer_is_noticed(smollm2: LLM, chat_request: RequestOutput) -> None:
    """The comparison itself: another token where the oracle is sure, or another likelihood, must not pass."""
    case, request = CHAT, chat_request
    sure = max(range(len(case.tokens)), key=lambda step: case.gaps[step])
    other = [t + (i == sure) for i, t in enumerate(case.tokens)]
    shifted = [x + 0.01 * (i == sure) for i, x in enumerate(case.logprobs)]
    with pytest.raises(AssertionError, match=f"token {sure} is"):
        assert_continues(smollm2, replace(case, tokens=other), request)
    with pytest.raises(AssertionError, match=f"log-probability {sure} differs"):
        assert_continues(smollm2, replace(case, logprobs=shifted), request)
    with pytest.raises(AssertionError, match=f"token {sure} has rank"):
        assert_teacher_forced(smollm2, replace(case, tokens=other))


def test_the_command_line_continues_as_the_oracle_does() -> None:
    real_model("gemma3-270m")
    case = GEMMA["capital"]
    assert not any(case.tie(step) for step in range(20))
    arguments = ["gemma3-270m", "The capital of France is", "--max-tokens", "20", "--temperature", "0"]
    command = [sys.executable, "-m", "sash", "generate", *arguments, "--dtype", "float32", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(run.stdout)
    assert document["prompt_token_ids"] == case.ids
    assert document["token_ids"] == case.tokens[:20]
    assert document["finish_reason"] == "length"
    assert "Use sliding window memory pool. full_layer_tokens=" in run.stderr


def test_fixtures_are_what_they_should_be() -> None:
    assert len(TWENTY) == 20
    assert len(SMOLLM2) == 5
    lengths = sorted(len(case.ids) for case in TWENTY)
    assert (lengths[0], lengths[-1]) == (10, 3000)
    assert {511, 512, 513, 1024, 1100, 2000} <= set(lengths)
    for case in (*TWENTY, *SMOLLM2.values()):
        assert len(case.tokens) == len(case.gaps) == len(case.max_logits) == len(case.logprobs) == 200
    assert sum(file.stat().st_size for file in FIXTURES.glob("oracle_*.json")) < 1_000_000


@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [case.name for case in TWENTY])
def test_each_prompt_alone_continues_as_the_oracle_does(gemma: LLM, name: str) -> None:
    continue_and_compare(gemma, [GEMMA[name]])


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_twenty_prompts_in_one_batch_continue_as_the_oracle_does(gemma: LLM) -> None:
    before = gemma.stats()
    continue_and_compare(gemma, TWENTY)
    assert gemma.stats()["preemptions"] == before["preemptions"]


@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SMOLLM2)
def test_smollm2_alone_continues_as_the_oracle_does(smollm2: LLM, name: str) -> None:
    continue_and_compare(smollm2, [SMOLLM2[name]])


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_smollm2_in_one_batch_continues_as_the_oracle_does(smollm2: LLM) -> None:
    continue_and_compare(smollm2, list(SMOLLM2.values()))
