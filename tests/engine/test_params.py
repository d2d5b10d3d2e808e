"""Every field of SamplingParams, through a whole engine: each test fails when its field is ignored."""

from __future__ import annotations

import pytest
import torch
from tests.engine.conftest import MakeLLM, Scores

from sash import LLM, SamplingParams
from sash.engine.outputs import CompletionOutput

PROMPT = "The window slides"
EOS = 2


def ask(llm: LLM, prompt: object = PROMPT, **params: object) -> CompletionOutput:
    """The one answer to a prompt; drawn with seed 3 unless told otherwise."""
    given = {"seed": 3, "max_tokens": 12, "ignore_eos": True} | params
    return llm.generate(prompt, SamplingParams(**given))[0].outputs[0]  # type: ignore[arg-type]


def best(oracle: Scores, llm: LLM, count: int) -> list[int]:
    """The greedy answer that transformers gives, and its prompt before it."""
    ids = llm.tokenizer.encode(PROMPT)
    for _ in range(count):
        ids.append(int(oracle(ids)[-1].argmax()))
    return ids


def test_temperature(llm: LLM, oracle: Scores) -> None:
    ids = best(oracle, llm, 8)
    assert ask(llm, temperature=0, max_tokens=8).token_ids == ids[-8:]
    answers = [ask(llm, temperature=t, max_tokens=30).token_ids for t in (0, 1e-6, 1.0, 5.0)]
    assert answers[0] == answers[1]
    assert answers[2] != answers[0] != answers[3] != answers[2]
    # Hotter is flatter: more different tokens.
    assert len(set(answers[3])) > len(set(answers[2])) > len(set(answers[0]))


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_a_filter_that_leaves_the_best_is_greedy(llm: LLM, narrow: dict[str, float]) -> None:
    assert ask(llm, **narrow).token_ids == ask(llm, temperature=0).token_ids != ask(llm).token_ids


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_change_an_answer(llm: LLM, penalty: str) -> None:
    """Of one that repeats itself; hand-computed values are in the sampler's own tests."""
    plain = ask(llm, max_tokens=30).token_ids
    assert max(plain.count(t) for t in plain) > 5
    assert ask(llm, max_tokens=30, **{penalty: 2.0}).token_ids != plain


def test_a_huge_repetition_penalty_never_repeats(llm: LLM) -> None:
    answer = ask(llm, temperature=0, repetition_penalty=1e9, max_tokens=25).token_ids
    assert len({*answer, *llm.tokenizer.encode(PROMPT)}) == 25 + len(set(llm.tokenizer.encode(PROMPT)))


def test_biases_and_bans(llm: LLM) -> None:
    assert ask(llm, logit_bias={44: 1000.0}).token_ids == [44] * 12
    assert set(ask(llm, allowed_token_ids=[7, 8, 9]).token_ids) <= {7, 8, 9}
    free = ask(llm).token_ids
    banned = ask(llm, bad_token_ids=free).token_ids
    assert not set(banned) & set(free)


def test_everything_banned_ends_that_answer_alone(llm: LLM) -> None:
    nothing = SamplingParams(allowed_token_ids=[5, 6], bad_token_ids=[5, 6], max_tokens=4)
    mate = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bad, good = llm.generate([PROMPT, PROMPT], [nothing, mate])
    assert bad.outputs[0].finish_reason == "error" and "bad_token_ids" in str(bad.outputs[0].error)
    assert bad.outputs[0].token_ids == []
    assert good.outputs[0].token_ids == ask(llm, temperature=0).token_ids
    assert good.outputs[0].finish_reason == "length"


# ------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_the_answer(llm: LLM, include: bool) -> None:
    free = ask(llm, max_tokens=30).text
    stop = free[5:8]
    got = ask(llm, max_tokens=30, stop=["never to be seen", stop], include_stop_str_in_output=include)
    at = free.index(stop)
    assert got.text == free[: at + len(stop) if include else at]
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    assert len(got.token_ids) < 30
    assert ask(llm, max_tokens=30, stop="never to be seen").text == free


def test_no_stop_string_ends_an_answer_before_min_tokens(llm: LLM) -> None:
    """The first min_tokens tokens go unsearched; one that begins in them does not count."""
    bias = {"logit_bias": {llm.tokenizer.encode("a", add_bos=False)[0]: 1000.0}, "max_tokens": 9}
    assert ask(llm, **bias).text == "a" * 9
    assert ask(llm, **bias, stop="aa").text == ""
    got = ask(llm, **bias, stop="aa", min_tokens=4)
    assert (got.text, len(got.token_ids), got.stop_reason) == ("aaaa", 6, "aa")
    got = ask(llm, **bias, stop="aa", min_tokens=4, include_stop_str_in_output=True)
    assert got.text == "a" * 6
    got = ask(llm, **bias, stop="aa", min_tokens=8)
    assert (got.text, got.finish_reason) == ("a" * 9, "length")


def test_stop_token_ids(llm: LLM) -> None:
    free = ask(llm).token_ids
    stop = free[4]
    got = ask(llm, stop_token_ids=[100, stop])
    assert got.token_ids == free[: free.index(stop) + 1]
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)


def test_the_model_s_end_token_and_ignore_eos(llm: LLM) -> None:
    bias = {"logit_bias": {EOS: 1000.0}, "max_tokens": 5}
    got = ask(llm, **bias, ignore_eos=False)
    assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == ([EOS], "", "stop", EOS)
    got = ask(llm, **bias, ignore_eos=True)
    assert (got.token_ids, got.finish_reason, got.stop_reason) == ([EOS] * 5, "length", None)


def test_skip_special_tokens(llm: LLM) -> None:
    bias = {"logit_bias": {EOS: 1000.0}, "max_tokens": 2}
    assert ask(llm, **bias).text == ""
    assert ask(llm, **bias, skip_special_tokens=False).text == "<eos><eos>"


def test_min_tokens_holds_back_end_tokens(llm: LLM) -> None:
    free = ask(llm).token_ids
    for own in ({"logit_bias": {EOS: 30.0}, "ignore_eos": False}, {"stop_token_ids": [free[0]]}):
        got = ask(llm, **own, min_tokens=3)
        end = EOS if "ignore_eos" in own else free[0]
        assert end not in got.token_ids[:3] and len(got.token_ids) > 3
        assert ask(llm, **own).token_ids == [end]
    assert len(ask(llm, logit_bias={EOS: 30.0}, ignore_eos=False, min_tokens=3).token_ids) == 4


def test_max_tokens(llm: LLM) -> None:
    room = 64 - len(llm.tokenizer.encode(PROMPT))
    for given, wanted in ((1, 1), (7, 7), (None, room), (1000, room)):
        got = ask(llm, max_tokens=given)
        assert (len(got.token_ids), got.finish_reason) == (wanted, "length")


def test_max_tokens_0_scores_the_prompt(llm: LLM, oracle: Scores) -> None:
    ids = list(range(3, 67))  # as long as the context
    (got,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1, n=2))
    assert [(o.token_ids, o.logprobs, o.finish_reason, o.text) for o in got.outputs] == [([], [], "length", "")] * 2
    assert_prompt_scores(got.prompt_logprobs, ids, oracle)


# --------------------------------------------------------------------------------- n and seeds


def test_n_answers_differ_and_the_first_is_that_of_n_1(make_llm: MakeLLM) -> None:
    """Whether all fork from one prompt or, for want of seats, some compute it again."""
    answers = []
    for seats in (4, 2, 1):
        llm = make_llm(max_num_seqs=seats)
        (out,) = llm.generate([PROMPT], SamplingParams(n=3, seed=5, max_tokens=10))
        assert [o.index for o in out.outputs] == [0, 1, 2]
        answers.append([o.token_ids for o in out.outputs])
        assert answers[-1][0] == ask(llm, seed=5, max_tokens=10, ignore_eos=False).token_ids
    assert len({tuple(a) for a in answers[0]}) == 3
    assert answers[0] == answers[1] == answers[2]


def test_the_same_seed_gives_the_same_answer_whatever_the_batch(llm: LLM) -> None:
    alone = ask(llm, seed=9).token_ids
    assert alone == ask(llm, seed=9 + (1 << 64)).token_ids
    params = [SamplingParams(seed=s, max_tokens=12, ignore_eos=True) for s in (1, 9, -9, 9)]
    outs = llm.generate(["Another text", PROMPT, PROMPT, PROMPT], params)
    answers = [o.outputs[0].token_ids for o in outs]
    assert answers[1] == answers[3] == alone
    assert answers[2] != alone


def test_without_a_seed_answers_follow_the_engine_s(make_llm: MakeLLM) -> None:
    def two(**options: int) -> list[list[int]]:
        free = SamplingParams(max_tokens=12, ignore_eos=True)
        return [o.outputs[0].token_ids for o in make_llm(**options).generate([PROMPT, PROMPT], free)]

    first = two()
    assert first[0] != first[1]
    assert two(seed=0) == first
    assert two(seed=1) != first != two(seed=-1)


def test_deterministic_answers_are_the_same_bit_for_bit(make_llm: MakeLLM) -> None:
    """Tokens and log-probabilities, alone, beside others, and in chunks of other lengths."""
    llm = make_llm(deterministic=True)
    params = SamplingParams(seed=4, max_tokens=8, logprobs=3, ignore_eos=True)
    (alone,) = llm.generate([PROMPT], params)
    texts = ["A first, longer text that takes some steps.", "b", PROMPT, "Fourth!"]
    together = llm.generate(texts, params)[2]
    (chunked,) = make_llm(deterministic=True, chunked_prefill_size=3).generate([PROMPT], params)
    for other in (together, chunked):
        assert other.outputs[0].token_ids == alone.outputs[0].token_ids
        assert other.outputs[0].logprobs == alone.outputs[0].logprobs


# --------------------------------------------------------------------------- log-probabilities


def assert_prompt_scores(got: list | None, ids: list[int], oracle: Scores, count: int = 1) -> None:
    wanted = oracle(ids)
    assert got is not None and len(got) == len(ids) and got[0] is None
    for i, position in enumerate(got[1:]):
        top = wanted[i].topk(count)
        assert set(position) == {ids[i + 1], *top.indices.tolist()}
        for token, own in position.items():
            assert own.logprob == pytest.approx(float(wanted[i, token]), abs=1e-3)
            assert own.rank == int((wanted[i] > wanted[i, token]).sum()) + 1


@pytest.mark.parametrize("count", [0, 4])
def test_logprobs_are_those_of_the_model(llm: LLM, oracle: Scores, count: int) -> None:
    """Of the raw logits: temperature, biases and bans don't show."""
    ids = llm.tokenizer.encode(PROMPT)
    got = ask(llm, logprobs=count, temperature=1.7, logit_bias={40: 3.0}, bad_token_ids=[41], top_k=50)
    assert got.logprobs is not None and len(got.logprobs) == len(got.token_ids) == 12
    wanted = oracle(ids + got.token_ids)[len(ids) - 1 : -1]
    for token, position, row in zip(got.token_ids, got.logprobs, wanted, strict=True):
        assert set(position) == {token, *row.topk(count).indices.tolist()}
        for other, own in position.items():
            assert own.logprob == pytest.approx(float(row[other]), abs=1e-3)
            assert own.rank == int((row > row[other]).sum()) + 1
            assert own.decoded_token == llm.tokenizer.decode([other], skip_special=False)
    own = wanted.gather(1, torch.tensor(got.token_ids)[:, None]).sum()
    assert got.cumulative_logprob == pytest.approx(float(own), abs=1e-2)


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    (out,) = llm.generate([PROMPT], SamplingParams(max_tokens=2))
    assert out.prompt_logprobs is None
    assert out.outputs[0].logprobs is None and out.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_prompt_logprobs_across_chunks(make_llm: MakeLLM, oracle: Scores, chunk: int | None) -> None:
    ids = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    llm = make_llm(chunked_prefill_size=chunk)
    mate = SamplingParams(max_tokens=20, seed=1)
    scored = SamplingParams(max_tokens=2, prompt_logprobs=3, n=2)
    got = llm.generate([PROMPT, ids], [mate, scored])[1]
    assert_prompt_scores(got.prompt_logprobs, ids, oracle, 3)


def test_prompt_logprobs_across_preemption(make_llm: MakeLLM, oracle: Scores) -> None:
    """An older request needs a page while the scored prompt is half computed."""
    ids = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    llm = make_llm(max_total_tokens=48, max_model_len=48, max_num_batched_tokens=4, max_num_seqs=2)
    old = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    got = llm.generate([[5, 6, 7, 8], ids], [old, SamplingParams(max_tokens=4, prompt_logprobs=2)])[1]
    assert got.metrics.preemptions >= 1
    assert_prompt_scores(got.prompt_logprobs, ids, oracle, 2)
