"""One decoder for every model: a ModelSpec, a dictionary of weights, a table of ops.

Attention over pages belongs to the caller, who passes it in as a function. The residual stream and
the norms are float32 whatever the weights are; linear layers run in the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sash.models.mlp import GatedMlp, MoeMlp, plain
from sash.models.prepare import Prepared, Weights, prepare
from sash.models.rope import Rope
from sash.ops.base import Ops, Weight
from sash.spec.model import BlockKind, LayerSpec, ModelSpec, NormKind, QkNorm, RopeSpec

# attend(layer, q [Nq, Hq, D], k [N, H, D], v [N, H, Dv], sink_logits [Hq] float32 | None) -> [Nq, Hq, Dv].
# q, k and v may be strided views of one buffer; their last dimension is contiguous. The scale and
# the soft cap of the LayerSpec are the callee's to apply.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Angles = list[tuple[torch.Tensor, torch.Tensor]]
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder:
    """Embedding, layers and head of a model.

    Args:
        spec: the model.
        weights: what ``prepare`` made of tensors of one dtype and device; emptied.
        ops: the table of ops; its ``attention`` is not used here.
        max_model_len: longest request in tokens; fixes the frequencies of dynamic NTK and LongRoPE.
    """

    def __init__(self, spec: ModelSpec, weights: Prepared, ops: Ops, *, max_model_len: int) -> None:
        self.spec, self.ops = spec, ops
        self.embed, self.head = weights.pop("embed"), weights.pop("head")
        final = weights.pop("final_norm")
        assert isinstance(final, torch.Tensor)
        self.dtype, self.device = final.dtype, final.device
        self._norm, self.final_norm = _norm_function(spec, ops), _norm_weight(spec, final)
        ropes: dict[RopeSpec, int] = {}
        self.layers = [Layer(spec, i, weights, ops, ropes, self.dtype) for i in range(len(spec.layers))]
        self.ropes = [Rope(rope, max_model_len, self.device) for rope in ropes]

    @classmethod
    def of(cls, spec: ModelSpec, weights: Weights, ops: Ops, *, max_model_len: int) -> Decoder:
        """A decoder from canonical weights, which are emptied. Raises ModelError when one is missing."""
        return cls(spec, prepare(spec, weights, ops), ops, max_model_len=max_model_len)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        narrow: Mapping[int, torch.Tensor] | None = None,
        watch: Callable[[int, torch.Tensor], object] | None = None,
    ) -> torch.Tensor:
        """Run all layers on all rows of a step.

        Args:
            token_ids: [N] int64.
            positions: [N] int64, absolute in each row's request.
            attend: attention of one layer; see ``Attend``. Called once per layer, in order.
            narrow: layer to the rows (int64, ascending, into the rows that enter that layer) whose output is
                still wanted. That layer's K and V are computed for all entering rows; its attention
                and everything above for the wanted rows only.
            watch: called with each layer's number and output [N, hidden] float32, which the next layer overwrites.

        Returns:
            [N', hidden] after the final norm, in the weights' dtype; N' rows are left by ``narrow``.
        """
        hidden = self.ops.embedding(token_ids, self.embed)
        if self.spec.embed_scale != 1.0:
            hidden.mul_(self.spec.embed_scale)
        angles = [rope.cos_sin(positions) for rope in self.ropes]
        for i, layer in enumerate(self.layers):
            keep = narrow.get(i) if narrow else None
            hidden = layer.run(hidden, angles, attend, keep)
            if watch is not None:
                watch(i, hidden)
            if keep is not None:
                angles = _rows(angles, keep)
        return self._norm(hidden, self.final_norm).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [M, vocab] float32, of rows of ``forward``'s result [M, hidden]."""
        return self.shape_logits(self.ops.linear(hidden, self.head, None).float())

    def shape_logits(self, out: torch.Tensor) -> torch.Tensor:
        """The head's products [M, vocab] float32 as the model's scale and cap make them logits."""
        if self.spec.logit_scale != 1.0:
            out = out * self.spec.logit_scale
        if self.spec.final_softcap:
            out = torch.tanh(out / self.spec.final_softcap) * self.spec.final_softcap
        return out


class Layer:
    """One decoder layer; everything that can be decided before the first step is decided in ``__init__``."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: Prepared,
        ops: Ops,
        ropes: dict[RopeSpec, int],
        dtype: torch.dtype,
    ) -> None:
        layer = spec.layers[index]
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
        self.index, self.dtype = index, dtype
        self.linear, self.rope_op, self.norm = ops.linear, ops.rope, _norm_function(spec, ops)
        self.heads, self.kv_heads = layer.num_heads, layer.num_kv_heads
        self.head_dim, self.v_head_dim = layer.head_dim, layer.v_head_dim
        self.q_out, self.k_out = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.v_out = layer.num_kv_heads * layer.v_head_dim
        self.qkv, self.qkv_bias = own.pop("qkv"), plain(own, "qkv_bias")
        self.o, self.o_bias = own.pop("o"), plain(own, "o_bias")
        sinks = plain(own, "sinks")
        self.sinks = None if sinks is None else sinks.float()
        self._set_norms(spec, layer, own)
        self.rope = None if layer.rope is None else ropes.setdefault(layer.rope, len(ropes))
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.mlp = (MoeMlp if layer.mlp.num_experts else GatedMlp)(layer.mlp, own, ops)

    def _set_norms(self, spec: ModelSpec, layer: LayerSpec, own: Prepared) -> None:
        def take(name: str) -> torch.Tensor | None:
            return _norm_weight(spec, own.pop(name)) if name in own else None

        self.attn_norm, self.post_attn_norm = take("attn_norm"), take("post_attn_norm")
        self.mlp_norm, self.post_mlp_norm = take("mlp_norm"), take("post_mlp_norm")
        self.parallel = spec.block is BlockKind.PARALLEL
        q_norm, k_norm = take("q_norm"), take("k_norm")
        self.head_norm: torch.Tensor | None = None
        self.full_norms: tuple[torch.Tensor, ...] = ()
        if q_norm is None or k_norm is None:
            return
        if layer.qk_norm is QkNorm.HEAD:
            # One row of weights per head, so that queries and keys take their norm in one call.
            self.head_norm = torch.cat((q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)))
        else:
            self.full_norms = (q_norm, k_norm)

    def run(self, hidden: torch.Tensor, angles: Angles, attend: Attend, keep: torch.Tensor | None) -> torch.Tensor:
        """hidden [N, hidden] float32 to [N or len(keep), hidden] float32; ``hidden`` may be overwritten."""
        x = hidden if self.attn_norm is None else self.norm(hidden, self.attn_norm)
        x = x.to(self.dtype)
        q, k, v = self._project(x, angles, keep)
        mixed = attend(self.index, q, k, v, self.sinks)
        out = self.linear(mixed.flatten(1).to(self.dtype), self.o, self.o_bias)
        if self.post_attn_norm is not None:
            out = self.norm(out.float(), self.post_attn_norm)
        if keep is not None:
            hidden = hidden.index_select(0, keep)
        if self.parallel:
            x = x if keep is None else x.index_select(0, keep)
            return hidden.add_(out).add_(self.mlp(x))
        hidden.add_(out)
        x = hidden if self.mlp_norm is None else self.norm(hidden, self.mlp_norm)
        out = self.mlp(x.to(self.dtype))
        if self.post_mlp_norm is not None:
            out = self.norm(out.float(), self.post_mlp_norm)
        return hidden.add_(out)

    def _project(
        self, x: torch.Tensor, angles: Angles, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of the kept rows, keys and values of all rows, normed and rotated."""
        joint, v = self.linear(x, self.qkv, self.qkv_bias).split((self.q_out + self.k_out, self.v_out), dim=-1)
        norm = self.head_norm
        if keep is None:
            placed = self._place(joint, norm, self.full_norms, angles)
            q, k = placed.split((self.heads, self.kv_heads), dim=1)
        else:
            # One product for all rows, though some queries go unused: a packed weight can't be sliced.
            wanted, keys = joint[:, : self.q_out].index_select(0, keep), joint[:, self.q_out :]
            q_norm, k_norm = (None, None) if norm is None else (norm[: self.heads], norm[self.heads :])
            q = self._place(wanted, q_norm, self.full_norms[:1], _rows(angles, keep))
            k = self._place(keys, k_norm, self.full_norms[1:], angles)
        return q, k, v.unflatten(-1, (self.kv_heads, self.v_head_dim))

    def _place(
        self, flat: torch.Tensor, head_norm: torch.Tensor | None, full_norms: tuple[torch.Tensor, ...], angles: Angles
    ) -> torch.Tensor:
        """Norm and rotate queries, keys or both, [N, heads · D]: [N, heads, D] in the weights' dtype.

        float32 from the product to the end, so that norm and rotation round once.
        """
        if self.rope is None and head_norm is None and not full_norms:
            return flat.unflatten(-1, (-1, self.head_dim))
        flat = flat.float()
        if full_norms:
            parts = flat.split([weight.shape[0] for weight in full_norms], dim=-1)
            flat = torch.cat([self.norm(x, w) for x, w in zip(parts, full_norms, strict=True)], dim=-1)
        x = flat.unflatten(-1, (-1, self.head_dim))
        if head_norm is not None:
            x = self.norm(x, head_norm)
        if self.rope is not None:
            cos, sin = angles[self.rope]
            x = self.rope_op(x, cos, sin, self.interleaved)
        return x.to(self.dtype)


def _rows(angles: Angles, keep: torch.Tensor) -> Angles:
    return [(cos.index_select(0, keep), sin.index_select(0, keep)) for cos, sin in angles]


def _norm_function(spec: ModelSpec, ops: Ops) -> Norm:
    """norm(x, weight) of the model's kind; weights are prepared by ``_norm_weight``."""
    eps = spec.norm_eps
    if spec.norm is NormKind.LAYER:
        return lambda x, weight: ops.layer_norm(x, weight, eps)
    return lambda x, weight: ops.rms_norm(x, weight, eps)


def _norm_weight(spec: ModelSpec, weight: Weight) -> torch.Tensor:
    """A norm weight in float32; the 1 of RMS_PLUS_ONE is added here, once."""
    assert isinstance(weight, torch.Tensor)
    return weight.float() + 1 if spec.norm is NormKind.RMS_PLUS_ONE else weight.float()
