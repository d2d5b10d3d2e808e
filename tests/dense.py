"""Dense attention over one request's rows, as obvious as it gets: what the decoder's tests attend with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from sash.kv.storage import quantise, restored
from sash.models.decoder import Attend
from sash.ops import reference, torch_ops
from sash.ops.base import Ops, as_is
from sash.spec.model import ModelSpec
from sash.spec.span import BoundSpan


def _no_attention(*args: object, **_: object) -> tuple[torch.Tensor, None]:
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
        pack=getattr(module, "pack", as_is),
    )
    for module in (reference, torch_ops)
}


def rounded(x: torch.Tensor, stored: str) -> torch.Tensor:
    """Rows [N, H, D] through the type that a pool stores them as, in float32."""
    if stored == "int8":
        return restored(*quantise(x), torch.float32)
    return x.to(getattr(torch, stored)).float()


@lru_cache
def hadamard(dim: int) -> torch.Tensor:
    """What turns keys before int8 rounds them, [D, D]: blocks of Sylvester's matrix, the largest that divide D."""
    block = torch.ones(1, 1)
    while dim % (2 * len(block)) == 0 and len(block) < 256:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)]) / 2**0.5
    return torch.block_diag(*[block] * (dim // len(block)))


def dense_attend(
    spec: ModelSpec,
    queries: Sequence[Sequence[int]],
    keys: Sequence[Sequence[int]],
    prompt_tokens: int = 0,
    stored: Sequence[str] | None = None,
) -> Attend:
    """Attention of one request; ``queries`` and ``keys`` are the positions of the rows at each layer, ``stored``
    what each layer stores K and V as (None: as they come)."""

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        own = spec.layers[layer]
        if stored is not None:
            turn = hadamard(k.shape[-1]) if stored[layer] == "int8" else torch.eye(k.shape[-1])
            k, v = rounded(k @ turn, stored[layer]) @ turn.T, rounded(v, stored[layer])
        groups = own.num_heads // own.num_kv_heads
        seen = _mask(own.span.bind(prompt_tokens), tuple(queries[layer]), tuple(keys[layer]))
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


@lru_cache(maxsize=64)
def _mask(bound: BoundSpan, queries: tuple[int, ...], keys: tuple[int, ...]) -> torch.Tensor:
    """Who sees whom: bool [queries, keys], asked one by one."""
    return torch.tensor([[bound.visible(q, k) for k in keys] for q in queries])


def attend_all(spec: ModelSpec, count: int, prompt_tokens: int = 0, stored: Sequence[str] | None = None) -> Attend:
    """Attention of one request whose ``count`` rows, from position 0, are all in hand."""
    rows = [range(count)] * len(spec.layers)
    return dense_attend(spec, rows, rows, prompt_tokens, stored)
