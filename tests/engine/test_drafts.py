"""Prompt lookup on lists of numbers, and requests with drafts through text. The index needs no torch."""

from __future__ import annotations

import random

import pytest
from tests.engine.conftest import MakeLLM, assert_idle

from sash import SamplingParams
from sash.engine.drafts import PromptLookup


def lookup(num_tokens: int = 4, longest: int = 3, shortest: int = 1) -> PromptLookup:
    return PromptLookup(num_tokens, longest, shortest)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert lookup().propose([1, 2, 3, 4, 5, 6, 7, 9, 2]) == [3, 4, 5, 6]
    assert lookup().propose([1, 2, 3, 4, 5]) == []
    assert lookup(shortest=2).propose([1, 2, 3, 9, 2]) == [], "one token is not enough"


def test_a_longer_match_is_preferred_then_a_later_one() -> None:
    text = [1, 2, 3, 10, 11, 12, 13, 8, 3, 20, 21, 22, 23, 2, 3]
    assert lookup().propose(text) == [10, 11, 12, 13], "2 3 stood at the beginning only"
    assert lookup(longest=1).propose(text) == [20, 21, 22, 23], "3 alone stood later too"
    assert lookup().propose([5, 6, 1, 5, 6, 2, 5, 6]) == [2, 5, 6, 2]


def test_a_period_goes_on() -> None:
    assert lookup(7).propose([9, 1, 2, 3, 1, 2, 3, 1, 2]) == [3, 1, 2, 3, 1, 2, 3]
    assert lookup(5).propose([7, 7]) == [7, 7, 7, 7, 7]


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_the_index_finds_what_a_search_finds(shortest: int) -> None:
    """Text that grows by one to five tokens between lookups, as accepted drafts let it."""
    rng = random.Random(shortest)
    for _ in range(40):
        symbols = rng.choice([6, 12])
        one, tokens = lookup(3, 4, shortest), [rng.randrange(symbols) for _ in range(rng.randint(1, 30))]
        for _ in range(20):
            assert one.propose(tokens) == naive(tokens, 3, 4, shortest), tokens
            tokens += [rng.randrange(symbols) for _ in range(rng.randint(1, 5))]


def naive(tokens: list[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    """By trying every place, longest match first; of the shortest only the last 16 places."""
    end = len(tokens)
    tail = tokens[end - shortest :]
    places = [p for p in range(shortest, end) if tokens[p - shortest : p] == tail][-16:]

    def match(place: int) -> int:
        return next((n for n in range(longest, 0, -1) if n <= place and tokens[place - n : place] == tokens[-n:]), 0)

    if end <= shortest or not places:
        return []
    place = max(places, key=lambda p: (match(p), p))
    out = list(tokens)
    for i in range(num_tokens):
        out.append(out[place + i])
    return out[end:]


class Counted(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        Counted.reads += 1
        return super().__getitem__(index)  # type: ignore[index]


def test_a_lookup_costs_the_same_in_a_long_text() -> None:
    """Counted in reads, not in seconds: 100 lookups, the text indexed before."""
    rng = random.Random(1)
    reads = {}
    for length in (1_000, 50_000):
        one, tokens = lookup(shortest=1), Counted(rng.randrange(5) for _ in range(length))
        one.propose(tokens)
        Counted.reads = 0
        for _ in range(100):
            tokens.append(rng.randrange(5))
            assert one.propose(tokens)
        reads[length] = Counted.reads
    assert 100 < reads[50_000] < 1.5 * reads[1_000]


def test_wrong_drafts_get_shorter_and_pause() -> None:
    one, tokens = lookup(8), [1, 2] * 20
    assert len(one.propose(tokens)) == 8
    one.settle(8, 3)
    assert len(one.propose(tokens)) == 4
    one.settle(4, 4)
    assert len(one.propose(tokens)) == 8
    pauses = []
    for _ in range(8):
        one.settle(len(one.propose(tokens)), 0)
        waited = 0
        while not (draft := one.propose(tokens)):
            waited += 1
        assert len(draft) == 1
        pauses.append(waited)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]
    one.settle(1, 1)
    assert len(one.propose(tokens)) == 2
    one.settle(2, 0)
    assert not one.propose(tokens) and not one.propose(tokens) and one.propose(tokens), "trust has come back"


# ------------------------------------------------------------------------------------------------ through text

LOOP = "the window slides and the window slides and "
CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, logprobs=2),
    "sampled": SamplingParams(seed=5, max_tokens=40, temperature=0.4, n=3),
    "min tokens": SamplingParams(temperature=0, max_tokens=40, min_tokens=20, ignore_eos=False),
    "to the end": SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
    "one": SamplingParams(temperature=0, max_tokens=1),
    "scores": SamplingParams(max_tokens=0, prompt_logprobs=1),
}
DRAFTS = {"speculative": "ngram", "prompt_lookup_min": 1, "max_model_len": 96, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_the_same_to_the_last_field(make_llm: MakeLLM, case: str) -> None:
    plain, drafting = make_llm(**(DRAFTS | {"speculative": "none"})), make_llm(**DRAFTS)
    prompts = [LOOP, "a" * 30, "no two alike", LOOP + "x"]
    for one, other in zip(plain.generate(prompts, CASES[case]), drafting.generate(prompts, CASES[case]), strict=True):
        assert [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in one.outputs] == [
            (o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in other.outputs
        ]
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
        metrics = other.metrics
        assert 0 <= metrics.accepted_tokens <= metrics.draft_tokens
        assert one.metrics.draft_tokens == 0


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_an_answer_in_the_middle_of_right_drafts(make_llm: MakeLLM, include: bool) -> None:
    plain, drafting = make_llm(**(DRAFTS | {"speculative": "none"})), make_llm(**DRAFTS)
    text = plain.generate(LOOP, SamplingParams(temperature=0, max_tokens=40)).pop().outputs[0].text
    accepted = 0
    for start in range(4, 30, 3):
        params = SamplingParams(
            temperature=0, max_tokens=40, logprobs=0, stop=text[start : start + 2], include_stop_str_in_output=include
        )
        ends = [list(llm.stream(LOOP, params)) for llm in (plain, drafting)]
        one, other = ([(d.outputs[0].text, d.outputs[0].token_ids) for d in deltas] for deltas in ends)
        assert one == other
        last = [deltas[-1].outputs[0] for deltas in ends]
        assert last[0].finish_reason == last[1].finish_reason == "stop"
        assert last[0].stop_reason == last[1].stop_reason == params.stop[0]
        accepted += ends[1][-1].metrics.accepted_tokens
        assert_idle(drafting)
    assert accepted > 0


def test_stats_and_metrics_count_drafts(make_llm: MakeLLM) -> None:
    llm = make_llm(**DRAFTS)
    outputs = llm.generate([LOOP, "a" * 30], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=1))
    stats = llm.stats()
    assert stats["draft_tokens"] == sum(o.metrics.draft_tokens for o in outputs) > 0
    assert stats["accepted_tokens"] == sum(o.metrics.accepted_tokens for o in outputs) > 0
    assert stats["steps"] < 40, "most tokens came from drafts"
