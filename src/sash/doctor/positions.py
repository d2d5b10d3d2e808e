"""Whether stored keys bear the angle of their absolute position: told by the keys of the first layer, which depend on
a token and its position alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sash.doctor.finding import Finding, Status, ok, skipped
from sash.doctor.reference import Reference, stored_keys
from sash.engine.runner import Runner

NAME = "positions-absolute"
# Rows that are looked at; and how far a stored key may be from its token's at its position, of its size.
_MOST = 256
_CLOSE = 0.1


def position_finding(
    runner: Runner, reference: Reference, text: Sequence[int], slots: Mapping[int, int], length: int
) -> Finding:
    """Compare stored rows (position to slot) of a text with what its tokens' keys must be there."""
    positions = sorted(p for p in slots if p < len(text))[-_MOST:]
    if not positions:
        return skipped(NAME, "the first layer keeps no rows: its window is the query itself")
    wanted = reference.first_layer_keys([text[p] for p in positions], positions)
    if wanted is None:
        return skipped(NAME, "the first layer uses no positions")
    stored = stored_keys(runner, [slots[p] for p in positions])
    off = _distance(stored, wanted)
    wrong = [i for i in range(len(positions)) if off[i] > _CLOSE]
    if not wrong:
        worst = float(off.max())
        return ok(
            NAME,
            f"keys stored for positions {positions[0]} … {positions[-1]} bear the angle of their own position "
            f"(off by {worst:.1%} at most)",
        )
    found = {positions[i]: _angle_of(reference, text[positions[i]], stored[i], length) for i in wrong[:8]}
    known = {p: r for p, r in found.items() if r is not None}
    if not known:
        return Finding(
            NAME,
            Status.FAIL,
            f"{len(wrong)} of {len(positions)} stored keys are not their tokens' at any position, first at position "
            f"{positions[wrong[0]]}",
            "rows are damaged after they were computed, or stand in another place than noted",
            "run the check again with SASH_KERNELS=reference to see whether a kernel is at fault",
        )
    position, angle = next(iter(known.items()))
    return Finding(
        NAME,
        Status.FAIL,
        f"the key of position {position} is stored with the angle of position {angle}; so are {len(wrong)} of "
        f"{len(positions)} rows, the first of them at position {positions[wrong[0]]}",
        f"positions start again when the ring wraps ({position} - {angle} = {position - angle}): slot and position are "
        f"two things",
        "rotate by the absolute position of each token (StepItem.start and on), whatever slot its row goes to",
    )


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[N, H, D] against the same: [N], of b's size."""
    a, b = a.flatten(1), b.flatten(1)
    return (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-9)


def _angle_of(reference: Reference, token: int, stored: torch.Tensor, length: int) -> int | None:
    """The position whose angle a stored key [H, D] of a token bears."""
    keys = reference.first_layer_keys([token] * length, range(length))
    assert keys is not None
    off = _distance(stored[None].expand_as(keys), keys)
    best = int(off.argmin())
    return best if off[best] <= _CLOSE else None
