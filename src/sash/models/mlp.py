"""Feed-forward blocks: a gated MLP and a mixture of experts."""

from __future__ import annotations

import torch

from sash.models.prepare import Prepared
from sash.ops.base import Ops
from sash.spec.model import MlpSpec


class GatedMlp:
    """down(activation(gate x) · up x), with gate and up fused into one product.

    Takes its weights out of ``weights`` (canonical names without the layer's prefix).
    """

    __slots__ = ("activation", "down", "down_bias", "gate_up", "gate_up_bias", "gated", "linear")

    def __init__(self, spec: MlpSpec, weights: Prepared, ops: Ops) -> None:
        self.linear, self.gated = ops.linear, ops.gated
        self.activation = spec.activation
        self.gate_up, self.gate_up_bias = weights.pop("gate_up"), plain(weights, "gate_up_bias")
        self.down, self.down_bias = weights.pop("down"), plain(weights, "down_bias")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] to [N, hidden], in x's dtype."""
        gated = self.gated(self.linear(x, self.gate_up, self.gate_up_bias), self.activation)
        return self.linear(gated, self.down, self.down_bias)


class MoeMlp:
    """A router picks ``experts_per_token`` gated MLPs per row; their outputs are summed by its weights.

    Rows are grouped by expert, so that each expert in use is called once per step.
    """

    __slots__ = ("down", "down_bias", "gate_up", "gate_up_bias", "ops", "router", "router_bias", "spec")

    def __init__(self, spec: MlpSpec, weights: Prepared, ops: Ops) -> None:
        self.spec, self.ops = spec, ops
        self.router, self.router_bias = weights.pop("router"), plain(weights, "router_bias")
        experts = range(spec.num_experts)
        self.gate_up, self.down = ([weights.pop(f"{name}.{e}") for e in experts] for name in ("gate_up", "down"))
        self.gate_up_bias, self.down_bias = plain(weights, "gate_up_bias"), plain(weights, "down_bias")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] to [N, hidden] float32."""
        scores, chosen = self.route(x)
        flat, order = chosen.flatten().sort(stable=True)
        rows = order // self.spec.experts_per_token
        row_scores = scores.flatten()[order]
        counts = torch.bincount(flat, minlength=self.spec.num_experts).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                y = self._expert(expert, x.index_select(0, rows[part]))
                out.index_add_(0, rows[part], y.float() * row_scores[part, None])
                start += count
        return out

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (float32) and expert numbers (int64) of each row of x: two times [N, experts_per_token]."""
        logits = self.ops.linear(x, self.router, self.router_bias).float()
        best, chosen = logits.topk(self.spec.experts_per_token, dim=-1)
        return best.softmax(dim=-1), chosen

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        down_bias = None if self.down_bias is None else self.down_bias[expert]
        gated = self.ops.gated(self.ops.linear(x, self.gate_up[expert], gate_up_bias), self.spec.activation)
        return self.ops.linear(gated, self.down[expert], down_bias)


def plain(weights: Prepared, name: str) -> torch.Tensor | None:
    """Take a weight that is never packed out of ``weights``; None where the model has none."""
    weight = weights.pop(name, None)
    assert weight is None or isinstance(weight, torch.Tensor)
    return weight
