"""Answers from outputs as engines give them: ranks, ties, scores that come late, numbers that JSON lacks."""

from __future__ import annotations

import math

from tests.server.apps import events
from tests.text.fakes import ByteTokenizer

from sash.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from sash.server.protocol.completions import CompletionRequest
from sash.server.replies.common import Head
from sash.server.replies.completions import CompletionReply
from sash.server.replies.logprobs import CompletionScores, TokenNames, chat_logprobs, prompt_logprobs

NAMES = TokenNames(ByteTokenizer())
# The token that was drawn comes first, whatever its rank; then the best.
POSITION: PositionLogprobs = {67: Logprob(-3.0, 3, "C"), 65: Logprob(-1.0, 1, "A"), 66: Logprob(-2.0, 2, "B")}


def test_the_best_come_first_and_the_own_one_is_never_missing() -> None:
    chat = chat_logprobs(NAMES, [67], [POSITION], 2)["content"][0]
    assert (chat["token"], chat["logprob"]) == ("C", -3.0)
    assert [best["token"] for best in chat["top_logprobs"]] == ["A", "B"]
    scores = CompletionScores(NAMES, frozenset(), 2).piece([67], [POSITION])
    assert scores["top_logprobs"] == [{"A": -1.0, "B": -2.0, "C": -3.0}]
    assert list(scores["top_logprobs"][0] or ()) == ["A", "B", "C"]


def test_tokens_of_one_spelling_keep_the_better_score() -> None:
    twins = TokenNames(ByteTokenizer([b"A"]))
    position = {256: Logprob(-2.0, 2, "A"), 65: Logprob(-1.0, 1, "A")}
    assert CompletionScores(twins, frozenset(), 2).piece([256], [position])["top_logprobs"] == [{"A": -1.0}]


def test_minus_infinity_is_a_number() -> None:
    position = {65: Logprob(-math.inf, 9, "A")}
    assert chat_logprobs(NAMES, [65], [position], 1)["content"][0]["logprob"] == -9999.0
    assert prompt_logprobs(NAMES, [None, position]) == [
        None,
        {"65": {"logprob": -9999.0, "rank": 9, "decoded_token": "A"}},
    ]
    assert prompt_logprobs(NAMES, None) is None


def test_answers_wait_for_the_scores_of_their_prompt() -> None:
    body = CompletionRequest(prompt=[[72, 73]], n=2, echo=True, logprobs=0, stream=True)
    stream = CompletionReply(body, Head.new("cmpl", "tiny"), [[72, 73]], ByteTokenizer()).stream()
    scores: list[PositionLogprobs | None] = [None, {73: Logprob(-1.0, 1, "I")}]

    def delta(index: int, token: int, prompt: list[PositionLogprobs | None] | None) -> RequestOutput:
        output = CompletionOutput(index, chr(token), [token], [{token: Logprob(-0.5, 1, chr(token))}])
        return RequestOutput("r", None, [72, 73], [output], prompt)

    assert stream.chunks([(0, [delta(1, 65, None)])]) == b""
    data = stream.chunks([(0, [delta(0, 66, scores), delta(1, 67, None)])]) + stream.end([])
    choices = [chunk["choices"][0] for chunk in events(data.decode())]
    assert [(c["index"], c["text"]) for c in choices] == [(1, "HIA"), (0, "HIB"), (1, "C")]
    assert [c["logprobs"]["token_logprobs"] for c in choices] == [[None, -1.0, -0.5], [None, -1.0, -0.5], [-0.5]]
