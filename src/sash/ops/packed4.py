"""int4 weights: groups of 32 inputs of an output share a scale and a least weight.

Half a byte per weight and an eighth for the two bfloat16 numbers. A group's range is the best of a few, narrower than
from its least to its largest weight, with scale and least weight fitted by least squares to what they round to.

Perplexity is 8 to 10 % above float32's in models of 135 to 270 million weights (int8: 0.1 to 0.3 %).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 32
_SHARES = (1.0, 0.95, 0.9, 0.85)
# Rows of a panel's group: nibbles, then scales and least weights.
_ROWS = GROUP // 8 + 1


def shape(panels: int, inputs: int, panel: int) -> tuple[int, ...]:
    """Of the bytes of ``panels`` panels of outputs: [panels, groups, 5, panel, 4] uint8."""
    return panels, -(-inputs // GROUP), _ROWS, panel, 4


def pack(rows: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Round rotated rows [N, inputs] float32 into panels ``to`` (see ``shape``); padding is zero already.

    Returns:
        [N] float32: 128 times the sum of scale · nibble of each output, which the kernels take off again because
        activations are stored plus 128.
    """
    count = len(rows)
    panels, groups, _, panel, _ = to.shape
    padded = F.pad(rows, (0, -rows.shape[1] % GROUP, 0, panels * panel - count)).unflatten(1, (groups, GROUP))
    real = torch.ones(rows.shape[1], device=rows.device)
    real = F.pad(real, (0, -rows.shape[1] % GROUP)).view(groups, GROUP)
    nibbles, scale, least = _round(padded, real)
    # [panels, panel, groups, GROUP / 8, 2, 4] to [panels, groups, GROUP / 8, panel, 4] of two nibbles each.
    split = nibbles.to(torch.uint8).view(panels, panel, groups, GROUP // 8, 2, 4)
    to[:, :, : _ROWS - 1] = (split[..., 0, :] | split[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
    numbers = torch.stack((scale, least)).view(2, panels, panel, groups).permute(1, 3, 0, 2)
    to[:, :, _ROWS - 1] = numbers.bfloat16().contiguous().view(torch.uint8).view(panels, groups, panel, 4)
    return 128 * (scale * nibbles.sum(-1)).sum(-1)[:count]


def unpack(panels: torch.Tensor) -> torch.Tensor:
    """The rotated weights in panels (see ``shape``): [panels · panel, groups · GROUP] float32."""
    count, groups, _, panel, _ = panels.shape
    pairs = panels[:, :, : _ROWS - 1].permute(0, 3, 1, 2, 4)
    nibbles = torch.stack((pairs & 15, pairs >> 4), dim=-2).reshape(count, panel, groups, GROUP)
    numbers = panels[:, :, _ROWS - 1].contiguous().view(torch.bfloat16).view(count, groups, 2, panel, 1).float()
    scale, least = numbers.permute(2, 0, 3, 1, 4)
    return (least + scale * nibbles).reshape(count * panel, groups * GROUP)


def _round(rows: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nibbles [N, groups, GROUP], scales and least weights [N, groups] of rows [N, groups, GROUP], all float32.

    ``real`` [groups, GROUP] is 0 where there is no weight but padding, whose nibbles are 0.
    """
    count = real.sum(-1)
    low = torch.where(real > 0, rows, torch.inf).amin(-1)
    high = torch.where(real > 0, rows, -torch.inf).amax(-1)
    mean = rows.sum(-1) / count
    out: tuple[torch.Tensor, ...] = ()
    best = torch.full_like(low, torch.inf)
    for share in _SHARES:
        half = (high - low) / 2 * share
        nibbles = _nibbles(rows, (low + high) / 2 - half, half / 7.5) * real
        middle = nibbles.sum(-1) / count
        from_middle = (nibbles - middle[..., None]) * real
        own = from_middle.square().sum(-1)
        scale = (from_middle * (rows - mean[..., None])).sum(-1) / torch.where(own > 0, own, 1.0)
        least = (mean - scale * middle).bfloat16().float()
        scale = scale.bfloat16().float()
        nibbles = _nibbles(rows, least, scale) * real
        error = ((least[..., None] + scale[..., None] * nibbles - rows) * real).square().sum(-1)
        better = error < best
        found = (nibbles, scale, least)
        out = tuple(
            torch.where(better if new.dim() == 2 else better[..., None], new, old)
            for new, old in zip(found, out or found, strict=True)
        )
        best = torch.minimum(best, error)
    return out[0], out[1], out[2]


def _nibbles(rows: torch.Tensor, least: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((rows - least[..., None]) * inverse[..., None]).round().clamp(0, 15)
