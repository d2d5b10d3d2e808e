"""Dense attention over one request's rows, as obvious as it gets: what the decoder's tests attend with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sash.models.decoder import Attend
from sash.ops import reference, torch_ops
from sash.ops.base import Ops
from sash.spec.model import ModelSpec


def _no_attention(*args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
    raise AssertionError("the decoder attends through the function that it is given")


OPS = {
    module.__name__.rsplit(".", 1)[-1]: Ops(
        name=module.__name__,
        linear=module.linear,
        rms_norm=module.rms_norm,
        layer_norm=module.layer_norm,
        rope=module.rope,
        gated=module.gated,
        attention=_no_attention,
    )
    for module in (reference, torch_ops)
}


def dense_attend(spec: ModelSpec, queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]) -> Attend:
    """Attention of one request; ``queries`` and ``keys`` are the positions of the rows at each layer."""

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        own = spec.layers[layer]
        span, groups = own.span.bind(prompt_tokens=0), own.num_heads // own.num_kv_heads
        seen = torch.tensor([[span.visible(i, j) for j in keys[layer]] for i in queries[layer]])
        out = torch.empty(q.shape[0], own.num_heads, own.v_head_dim)
        for head in range(own.num_heads):
            kv = head // groups
            scores = q[:, head].float() @ k[:, kv].float().T * own.scale
            if own.softcap:
                scores = torch.tanh(scores / own.softcap) * own.softcap
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(scores.shape[0], 1)), dim=1)
            out[:, head] = scores.softmax(dim=-1)[:, : k.shape[0]] @ v[:, kv].float()
        return out.to(q.dtype)

    return attend


def attend_all(spec: ModelSpec, count: int) -> Attend:
    """Attention of one request whose ``count`` rows, from position 0, are all in hand."""
    rows = [range(count)] * len(spec.layers)
    return dense_attend(spec, rows, rows)
