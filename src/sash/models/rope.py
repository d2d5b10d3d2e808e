"""Rotary frequencies: default, linear, dynamic NTK, YaRN, LongRoPE and llama3.

Angles are computed per step from positions, once for every distinct RopeSpec, instead of being
looked up in tables: for one row that is as quick, for 512 rows it takes a fraction of a
millisecond, and no table of max_model_len rows is held.

Sources: arXiv 2104.09864 (RoPE), 2306.15595 (linear), 2309.00071 (YaRN, dynamic NTK),
2402.13753 (LongRoPE), 2407.21783 (llama3).
"""

from __future__ import annotations

import math

import torch

from sash.spec.errors import ModelError
from sash.spec.model import RopeKind, RopeSpec


class Rope:
    """The rotation of all layers that share a RopeSpec.

    Dynamic NTK and LongRoPE have several frequency sets; which one applies is fixed here from
    ``max_model_len``, so that a row's keys don't depend on how long the text was when it was computed.
    """

    def __init__(self, spec: RopeSpec, max_model_len: int, device: torch.device) -> None:
        self.interleaved = spec.interleaved
        self.inv_freq = inverse_frequencies(spec, max_model_len).to(device)
        self.factor = attention_factor(spec)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [N, rotary_dim / 2], float32, of positions [N]."""
        angles = positions[:, None].to(torch.float32) * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos.mul_(self.factor)
            sin.mul_(self.factor)
        return cos, sin


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> torch.Tensor:
    """Radians per position of each pair: [rotary_dim / 2], float32.

    Computed in float32 in the order that the models' reference code uses: at position 30 000 a
    rounding of the frequency is a visible angle.
    """
    dim = spec.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    match spec.kind:
        case RopeKind.DEFAULT:
            return 1.0 / spec.base**exponents
        case RopeKind.LINEAR:
            return 1.0 / spec.base**exponents / spec.factor
        case RopeKind.DYNAMIC:
            return 1.0 / _dynamic_base(spec, max_model_len) ** exponents
        case RopeKind.YARN:
            return _yarn(spec, spec.base**exponents)
        case RopeKind.LONGROPE:
            factors = spec.long_factor if max_model_len > spec.original_max_position else spec.short_factor
            if len(factors) != dim // 2:
                raise ModelError(f"long_factor and short_factor need {dim // 2} numbers each, got {len(factors)}")
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.base**exponents)
        case RopeKind.LLAMA3:
            return _llama3(spec, 1.0 / spec.base**exponents)


def attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied with: the spec's own factor or the rule of its kind."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind is RopeKind.YARN:
        if spec.mscale and spec.mscale_all_dim:
            return _yarn_scale(spec.factor, spec.mscale) / _yarn_scale(spec.factor, spec.mscale_all_dim)
        return _yarn_scale(spec.factor, 1.0)
    if spec.kind is RopeKind.LONGROPE and spec.factor > 1:
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))
    return 1.0


def _dynamic_base(spec: RopeSpec, max_model_len: int) -> float:
    stretch = max(max_model_len, spec.max_position) / spec.max_position
    return spec.base * (spec.factor * stretch - (spec.factor - 1)) ** (spec.rotary_dim / (spec.rotary_dim - 2))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(spec: RopeSpec, wavelengths: torch.Tensor) -> torch.Tensor:
    """Fast pairs keep their frequency, slow ones are divided by ``factor``, with a ramp between."""
    dim = spec.rotary_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(spec.original_max_position / (times * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = pair_that_turns(spec.beta_fast), pair_that_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (spec.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3(spec: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Wavelengths above the old context are stretched by ``factor``, short ones kept, with a ramp between."""
    context, low, high = spec.original_max_position, spec.low_freq_factor, spec.high_freq_factor
    wavelengths = 2 * math.pi / inv_freq
    kept = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / spec.factor + kept * inv_freq
