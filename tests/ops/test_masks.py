"""A mask takes the tokens that it doesn't allow out of a row, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sash.ops.masks import Mask
from sash.ops.sampling import choose, sampler_state
from sash.spec.sampling import SamplingParams

VOCAB = 5003


def packed(allowed: np.ndarray) -> np.ndarray:
    """Bits with those after the vocabulary set: they stand for no token."""
    bits = np.packbits(allowed, bitorder="little")
    bits[-1] |= 0xFF << (len(allowed) % 8) & 0xFF
    return bits


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.2}])
def test_the_token_is_that_of_a_row_without_the_others(share: float, params: dict[str, float]) -> None:
    random = np.random.default_rng(7)
    state = sampler_state(
        SamplingParams(**params),
        seed=5,
        stop_ids=(),
        prompt=[1],
        vocab_size=VOCAB,
        device=torch.device("cpu"),  # type: ignore[arg-type]
    )
    for position in range(20):
        allowed = random.random(VOCAB) < share
        logits = torch.from_numpy(random.normal(size=VOCAB).astype(np.float32)) * 3
        mask = Mask(packed(allowed))
        before = logits.clone()
        values, ids = mask.apply(logits)
        assert torch.equal(logits, before)
        banned = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
        if ids is None:
            assert torch.equal(values, banned)
        else:
            assert ids.tolist() == np.flatnonzero(allowed).tolist() and torch.equal(values, logits[ids])
        if allowed.any():
            token = choose(values, state, position, ids)
            assert token == choose(banned, state, position)
            assert allowed[token] and mask.allows(token)
        assert [mask.allows(i) for i in range(100)] == allowed[:100].tolist()


def test_both_ways_are_taken() -> None:
    few, many = np.zeros(VOCAB, np.bool_), np.ones(VOCAB, np.bool_)
    few[[3, VOCAB - 1]] = True
    row = torch.zeros(VOCAB)
    assert Mask(packed(few)).apply(row)[1] is not None
    assert Mask(packed(many)).apply(row)[1] is None
