"""From logits to a token: each filter, each penalty, and the noise."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sash.ops import sampling
from sash.ops.sampling import (
    SamplerState,
    choose,
    count_token,
    gumbel,
    sampler_state,
    shape_logits,
    token_logprobs,
)
from sash.spec.sampling import SamplingParams

CPU = torch.device("cpu")
PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBABILITIES.log() + 3


def state(
    params: SamplingParams, *, vocab: int = 5, seed: int = 11, prompt: tuple[int, ...] = (), stop: tuple[int, ...] = ()
) -> SamplerState:
    return sampler_state(params, seed=seed, stop_ids=stop, prompt=prompt, vocab_size=vocab, device=CPU)


def draws(params: SamplingParams, count: int = 2000, logits: torch.Tensor = LOGITS) -> Counter[int]:
    own = state(params, vocab=len(logits))
    return Counter(choose(shape_logits(logits, own, 0), own, position) for position in range(count))


def distance(counts: Counter[int], probabilities: torch.Tensor) -> float:
    """Pearson's chi-square over the tokens with a probability; a token without one must not occur."""
    total, out = counts.total(), 0.0
    for token, probability in enumerate(probabilities.tolist()):
        if probability == 0:
            assert counts[token] == 0
        else:
            out += (counts[token] - total * probability) ** 2 / (total * probability)
    return out


def filtered(*kept: int, temperature: float = 1.0) -> torch.Tensor:
    """What is left of the distribution when only ``kept`` may be drawn."""
    mask = torch.full((5,), -math.inf)
    mask[list(kept)] = 0.0
    return ((LOGITS + mask) / temperature).softmax(0)


# Chance lets four degrees of freedom exceed this once in 100 000 times.
ENOUGH = 28.5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_divides_logits(temperature: float) -> None:
    counts = draws(SamplingParams(temperature=temperature))
    assert distance(counts, (LOGITS / temperature).softmax(0)) < ENOUGH
    assert distance(counts, (LOGITS / temperature / 2).softmax(0)) > ENOUGH


def test_draws_follow_the_distribution_over_seeds_too() -> None:
    counts = Counter(choose(LOGITS, state(SamplingParams(), seed=seed), 3) for seed in range(2000))
    assert distance(counts, PROBABILITIES) < ENOUGH


def test_temperature_0_takes_the_best_and_of_equals_the_first() -> None:
    greedy = state(SamplingParams(temperature=0), vocab=300)
    logits = torch.zeros(300)
    for best in ((299,), (40, 41), (7, 250), (0, 299)):
        row = logits.clone()
        row[list(best)] = 2.0
        assert choose(row, greedy, 0) == best[0]
        assert int(row[None].max(-1).indices[0]) == best[0]  # as the runner takes it for a whole batch


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_a_very_small_temperature_is_greedy(temperature: float) -> None:
    """Divided as they are, logits would overflow to an infinity that several of them share."""
    assert draws(SamplingParams(temperature=temperature), 20) == {1: 20}
    huge = torch.tensor([0.9e30, 1e30, 0.0])
    assert draws(SamplingParams(temperature=temperature), 20, huge) == {1: 20}


@pytest.mark.parametrize(("top_k", "kept"), [(1, (1,)), (2, (1, 3)), (4, (1, 3, 4, 2)), (5, range(5)), (99, range(5))])
def test_top_k(top_k: int, kept: tuple[int, ...]) -> None:
    assert distance(draws(SamplingParams(top_k=top_k)), filtered(*kept)) < ENOUGH


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_of_0_or_minus_1_keeps_all(top_k: int) -> None:
    assert distance(draws(SamplingParams(top_k=top_k)), PROBABILITIES) < ENOUGH


NUCLEI = [
    (1e-9, (1,)),
    (0.399, (1,)),
    (0.401, (1, 3)),
    (0.649, (1, 3)),
    (0.651, (1, 3, 4)),
    (0.949, (1, 3, 4, 2)),
    (0.951, range(5)),
    (1.0, range(5)),
]


@pytest.mark.parametrize("depth", [12.0, 0.7])
@pytest.mark.parametrize(("top_p", "kept"), NUCLEI)
def test_top_p_is_the_smallest_set_that_reaches_it(
    top_p: float, kept: tuple[int, ...], depth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it reaches deeper than the first look."""
    monkeypatch.setattr(sampling, "_NUCLEUS_DEPTH", depth)
    assert distance(draws(SamplingParams(top_p=top_p), 1000), filtered(*kept)) < ENOUGH


@pytest.mark.parametrize("depth", [12.0, 0.2])
def test_a_large_nucleus(depth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_NUCLEUS_DEPTH", depth)
    logits = -torch.arange(6000) * 1e-4
    order = torch.randperm(6000, generator=torch.Generator().manual_seed(0))
    wanted = int((logits.double().softmax(0).cumsum(0) < 0.9).sum()) + 1
    values, ids = sampling._candidates(logits[torch.argsort(order)], SamplingParams(top_p=0.9))
    assert 2000 < wanted < 5900
    assert abs(len(ids) - wanted) <= 1  # float32 may put the last one on either side
    assert torch.equal(ids, order[: len(ids)]) and torch.equal(values, logits[: len(ids)])


def test_top_p_counts_within_top_k() -> None:
    """Of the best two, 0.4 and 0.25, the first alone has 0.615."""
    assert draws(SamplingParams(top_k=2, top_p=0.61), 300) == {1: 300}
    assert set(draws(SamplingParams(top_k=2, top_p=0.62), 300)) == {1, 3}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, range(5)), (0.12, range(5)), (0.13, (1, 2, 3, 4)), (0.6, (1, 3)), (1.0, (1,))]
)
def test_min_p_is_a_share_of_the_best(min_p: float, kept: tuple[int, ...]) -> None:
    assert distance(draws(SamplingParams(min_p=min_p)), filtered(*kept)) < ENOUGH


def test_min_p_looks_at_probabilities_after_temperature() -> None:
    """At temperature 2 the second is 0.79 of the best, at 1 it is 0.625."""
    assert set(draws(SamplingParams(min_p=0.7, temperature=2.0), 300)) == {1, 3, 4}
    assert set(draws(SamplingParams(min_p=0.7), 300)) == {1}


def shaped(params: SamplingParams, logits: list[float], answer: tuple[int, ...] = (), **given: object) -> list[float]:
    own = state(params, vocab=len(logits), **given)  # type: ignore[arg-type]
    for token in answer:
        count_token(own, token)
    before = torch.tensor(logits)
    out = shape_logits(before, own, len(answer))
    assert before.tolist() == logits
    return out.tolist()


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    """Positive logits of seen tokens are divided by it, negative ones multiplied, however often seen."""
    params = SamplingParams(repetition_penalty=2.0)
    got = shaped(params, [3.0, 3.0, -3.0, 3.0, -3.0], prompt=(0, 2, 0), answer=(2, 3, 3))
    assert got == [1.5, 3.0, -6.0, 1.5, -3.0]


def test_presence_and_frequency_penalties_count_the_answer_alone() -> None:
    logits = [1.0, 1.0, 1.0, 1.0, 1.0]
    given = {"prompt": (0, 1, 1), "answer": (1, 2, 2, 2)}
    assert shaped(SamplingParams(presence_penalty=0.5), logits, **given) == [1.0, 0.5, 0.5, 1.0, 1.0]
    assert shaped(SamplingParams(frequency_penalty=0.25), logits, **given) == [1.0, 0.75, 0.25, 1.0, 1.0]
    assert shaped(SamplingParams(frequency_penalty=-2.0), logits, **given) == [1.0, 3.0, 7.0, 1.0, 1.0]
    every = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert shaped(every, logits, **given) == [0.5, -0.25, -0.75, 1.0, 1.0]


def test_biases_and_bans() -> None:
    logits = [1.0, 2.0, 3.0, 4.0]
    assert shaped(SamplingParams(logit_bias={1: 2.5, 3: -100.0}), logits) == [1.0, 4.5, 3.0, -96.0]
    assert shaped(SamplingParams(allowed_token_ids=[0, 2]), logits) == [1.0, -math.inf, 3.0, -math.inf]
    assert shaped(SamplingParams(bad_token_ids=[0, 2]), logits) == [-math.inf, 2.0, -math.inf, 4.0]
    mixed = SamplingParams(allowed_token_ids=[0, 2], bad_token_ids=[2], logit_bias={0: 1.0, 1: 9.0, 2: 9.0})
    assert shaped(mixed, logits) == [2.0, -math.inf, -math.inf, -math.inf]


def test_stop_ids_are_banned_until_min_tokens() -> None:
    params, logits = SamplingParams(min_tokens=2), [1.0, 2.0, 3.0]
    for answer, wanted in (((), -math.inf), ((0,), -math.inf), ((0, 0), 3.0)):
        assert shaped(params, logits, answer=answer, stop=(2,)) == [1.0, 2.0, wanted]
    assert shaped(SamplingParams(), logits, stop=(2,)) == logits


def test_a_stop_id_outside_the_vocabulary_is_no_one_s_token() -> None:
    assert shaped(SamplingParams(min_tokens=1), [1.0, 2.0], stop=(1, 7)) == [1.0, -math.inf]


def test_unshaped_logits_are_not_copied() -> None:
    logits = torch.zeros(5)
    assert shape_logits(logits, state(SamplingParams(temperature=0.5, top_k=3)), 0) is logits


# ------------------------------------------------------------------------------------- noise


def uniforms(values: torch.Tensor) -> torch.Tensor:
    """Gumbel noise back to uniform numbers."""
    return torch.exp(-torch.exp(-values.double()))


def along(axis: str, count: int) -> torch.Tensor:
    """Noise over ids, positions or seeds, the other two fixed."""
    if axis == "ids":
        return gumbel(5, 9, torch.arange(count))
    own = torch.tensor([3])
    if axis == "positions":
        return torch.cat([gumbel(5, i, own) for i in range(count)])
    return torch.cat([gumbel(i, 9, own) for i in range(count)])


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds"])
def test_noise_is_uniform_and_independent_along(axis: str) -> None:
    """Kolmogorov and Smirnov's distance at one in 100 000; neighbours uncorrelated within five deviations."""
    count = 100_000 if axis == "ids" else 4000
    values = uniforms(along(axis, count))
    steps = torch.arange(1, count + 1).double() / count
    ordered = values.sort().values
    assert float((ordered - steps).abs().max()) * count**0.5 < 2.5
    assert float(ordered[0]) > 0 and float(ordered[-1]) < 1
    for lag in (1, 2, 16, 256):
        together = torch.corrcoef(torch.stack([values[:-lag], values[lag:]]))[0, 1]
        assert abs(float(together)) * (count - lag) ** 0.5 < 5


def test_noise_of_a_token_does_not_depend_on_the_other_candidates() -> None:
    whole = gumbel(1, 2, torch.arange(1000))
    some = torch.tensor([999, 3, 500, 3])
    assert torch.equal(gumbel(1, 2, some), whole[some])
    assert torch.equal(gumbel(1, 2, torch.arange(1000)), whole)
    for other in (gumbel(2, 2, torch.arange(1000)), gumbel(1, 3, torch.arange(1000))):
        assert not bool((other == whole).any())


def test_noise_is_the_same_everywhere_and_always() -> None:
    """SplitMix64's published first output, the tensor version against the scalar one, and three values kept."""
    assert sampling.mix64(0) == 0xE220A8397B1DCDAF
    numbers = [0, 1, -1, 1 << 62, -(1 << 63), 0x123456789ABCDEF]
    got = sampling._mix_tensor(torch.tensor(numbers)).tolist()
    assert got == [sampling._signed(sampling.mix64(n)) for n in numbers]
    kept = [2.0825209617614746, 0.16078181564807892, 0.3309296667575836]
    torch.testing.assert_close(gumbel(7, 100, torch.tensor([0, 1, 100_000])), torch.tensor(kept), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("seed", "same"), [(-1, (1 << 64) - 1), (1 << 64, 0), (5 - (1 << 65), 5)])
def test_any_integer_is_a_seed_modulo_two_to_the_64(seed: int, same: int) -> None:
    ids = torch.arange(50)
    assert torch.equal(gumbel(seed, 0, ids), gumbel(same, 0, ids))
    assert not torch.equal(gumbel(seed, 0, ids), gumbel(same + 1, 0, ids))


# --------------------------------------------------------------------------- log-probabilities


def test_log_probabilities_ranks_and_the_best() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 4.0], [0.0, -1.0, 5.0, -math.inf]])
    rows = token_logprobs(logits, torch.tensor([2, 2]), 2)
    wanted = logits.log_softmax(-1)
    assert [r.rank for r in rows] == [3, 1]
    for i, row in enumerate(rows):
        assert row.token_id == 2
        assert row.logprob == pytest.approx(float(wanted[i, 2]), abs=1e-6)
        best = wanted[i].sort(descending=True).values[:2]
        assert row.top_logprobs == pytest.approx(best.tolist(), abs=1e-6)
    assert set(rows[0].top_ids) == {1, 3} and rows[1].top_ids == (2, 0)
    tied = token_logprobs(logits, torch.tensor([3, 3]), 0)
    assert [(r.rank, r.logprob, r.top_ids) for r in tied][1] == (4, -math.inf, ())
    assert tied[0].rank == 1
