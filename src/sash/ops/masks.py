"""Which tokens may follow, as a bit each: applied to one row of logits."""

from __future__ import annotations

import math

import numpy as np
import torch

# Bytes with an allowed token among them, of all, below which the allowed tokens alone are looked at.
_SPARSE = 1 / 64


class Mask:
    """A bit for each token [ceil(V / 8)] uint8, lowest first."""

    __slots__ = ("_bits",)

    def __init__(self, bits: np.ndarray) -> None:
        self._bits = bits

    def allows(self, token: int) -> bool:
        """Whether the bit of ``token`` is set."""
        return bool(self._bits[token >> 3] >> (token & 7) & 1)

    def apply(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [V] float32 of the allowed tokens: [N] with their ids [N] where they are few, else [V] with the others
        at -inf and no ids. A new tensor either way.

        numpy does it, because torch would spread over threads what one does in microseconds.
        """
        vocab = logits.shape[0]
        places = np.flatnonzero(self._bits)
        if len(places) <= len(self._bits) * _SPARSE:
            rows, bits = np.nonzero(np.unpackbits(self._bits[places, None], axis=1, bitorder="little"))
            ids = places[rows] * 8 + bits
            chosen = torch.from_numpy(ids[ids < vocab]).to(logits.device)
            return logits[chosen], chosen
        allowed = np.unpackbits(self._bits, count=vocab, bitorder="little").view(np.bool_)
        if logits.device.type == "cpu":
            return torch.from_numpy(np.where(allowed, logits.numpy(), np.float32(-math.inf))), None
        return torch.where(torch.from_numpy(allowed).to(logits.device), logits, -math.inf), None
