"""Draws by the C++ kernels: the noise of a whole vocabulary without its logarithms."""

from __future__ import annotations

import torch

from sash.ops import sampling


def race(logits: torch.Tensor, temperature: float, seed: int, position: int) -> int:
    """See ``sash.ops.sampling.race``: the same token, because the kernel only rules out who can't win."""
    if logits.device.type != "cpu" or logits.dtype is not torch.float32 or not logits.is_contiguous():
        return sampling.race(logits, temperature, seed, position)
    import sash._native as _native

    key, divisor = sampling.noise_key(seed, position), sampling.divisor(temperature)
    ids = _native.race(logits.data_ptr(), len(logits), divisor, key, torch.get_num_threads())
    if not ids:
        return sampling.race(logits, temperature, seed, position)
    return sampling.race_among(logits, ids, temperature, seed, position)
