"""The decoder as one call into C++ per step.

``Decoder.forward`` is its reference: the same layers op by op. Everything that can be decided before
the first step is handed over once, as addresses; a step passes its rows, angles and views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from sash.kv.storage import Index, Planes, key_block
from sash.models.decoder import Decoder, Layer
from sash.models.mlp import GatedMlp
from sash.ops import native, native_linear
from sash.ops.native_linear import Described
from sash.ops.packed import KINDS, PANEL, PackedLinear
from sash.ops.paged import PagedBatch
from sash.spec.model import Activation, BlockKind, NormKind

# More rows are bound by products, not by reading weights: cutting bits out costs more than it saves.
_SEARCHED_ROWS = 4
_ACTIVATIONS = (Activation.SILU, Activation.GELU, Activation.GELU_TANH)


class View(Protocol):
    """One KV group in one step: the attention batch, and the rows and slots to write before and after it."""

    @property
    def batch(self) -> PagedBatch: ...
    @property
    def early(self) -> tuple[Index, Index] | None: ...
    @property
    def late(self) -> tuple[Index, Index] | None: ...


def obstacle(decoder: Decoder) -> str:
    """Why this model must run op by op; empty where it need not."""
    if decoder.ops.name != "native" or decoder.device.type != "cpu":
        return f"{decoder.ops.name} ops on {decoder.device.type}"
    if not all(isinstance(layer.mlp, GatedMlp) for layer in decoder.layers):
        return "a mixture of experts"
    if any(layer.mlp.activation not in _ACTIVATIONS for layer in decoder.layers if isinstance(layer.mlp, GatedMlp)):
        return "an activation of its own"
    if decoder.dtype not in (torch.float32, torch.bfloat16):
        return f"{decoder.dtype}"
    if not all(isinstance(w, PackedLinear) for w in (decoder.head, *_linears(decoder.layers[0]))):
        return "weights that are not packed"
    return ""


def _linears(layer: Layer) -> tuple[Any, ...]:
    assert isinstance(layer.mlp, GatedMlp)
    return layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down


class FusedDecoder:
    """A decoder whose steps run in C++.

    Args:
        decoder: its layers; ``obstacle`` must be empty.
        planes: each layer's part of its pool.
    """

    def __init__(self, decoder: Decoder, planes: Sequence[Planes]) -> None:
        import sash._native as _native

        spec = decoder.spec
        self._decoder, self._native = decoder, _native
        # Tensors whose addresses the model holds.
        self._held: list[Any] = []
        model = _native.Model()
        model.hidden, model.eps, model.embed_scale = spec.hidden_size, spec.norm_eps, spec.embed_scale
        model.layer_norm, model.parallel = spec.norm is NormKind.LAYER, spec.block is BlockKind.PARALLEL
        model.type = native.TYPES[decoder.dtype]
        model.final_norm = self._address(decoder.final_norm)
        self._head = self._describe(decoder.head, None)
        self._room = torch.empty(0, -(-spec.vocab_size // PANEL) * PANEL)
        self._tied = decoder.embed is decoder.head
        model.head = self._head.native
        for rope in decoder.ropes:
            model.rope(self._address(rope.inv_freq), len(rope.inv_freq), rope.factor)
        for layer, plane in zip(decoder.layers, planes, strict=True):
            model.add(self._layer(layer, plane))
        self._model = model
        # Where the logits are the head's results as they are, the largest is found from 6 of their weights' 8 bits.
        plain = spec.logit_scale == 1.0 and not spec.final_softcap and self._head.native.kind == KINDS.index("int8")
        self._search = _native.Search(self._head.native, torch.get_num_threads()) if plain else None

    def _address(self, tensor: torch.Tensor | None) -> int:
        """Of a contiguous float32 copy, or of the tensor itself; 0 for none."""
        if tensor is None:
            return 0
        tensor = tensor.float().contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()

    def _describe(self, weight: Any, bias: torch.Tensor | None) -> Described:
        assert isinstance(weight, PackedLinear)
        described = native_linear.describe(weight, bias)
        self._held.append(described)
        return described

    def _layer(self, layer: Layer, planes: Planes) -> Any:
        assert isinstance(layer.mlp, GatedMlp)
        spec = self._decoder.spec.layers[layer.index]
        out = self._native.Layer()
        out.qkv = self._describe(layer.qkv, layer.qkv_bias).native
        out.o = self._describe(layer.o, layer.o_bias).native
        out.gate_up = self._describe(layer.mlp.gate_up, layer.mlp.gate_up_bias).native
        out.down = self._describe(layer.mlp.down, layer.mlp.down_bias).native
        for name in ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "head_norm", "sinks"):
            setattr(out, name, self._address(getattr(layer, name)))
        if layer.full_norms:
            out.q_norm, out.k_norm = (self._address(weight) for weight in layer.full_norms)
        out.heads, out.kv_heads, out.dim, out.v_dim = layer.heads, layer.kv_heads, layer.head_dim, layer.v_head_dim
        out.rope = -1 if layer.rope is None else layer.rope
        out.interleaved, out.scale, out.softcap = layer.interleaved, spec.scale, spec.softcap
        out.activation = _ACTIVATIONS.index(layer.mlp.activation)
        out.k_pool, out.v_pool, out.slots = planes.k.data_ptr(), planes.v.data_ptr(), planes.k.shape[1]
        out.kv_type = native.TYPES[planes.k.dtype]
        out.key_block = key_block(planes)
        if planes.k_scale is not None and planes.v_scale is not None:
            out.k_pool_scale, out.v_pool_scale = planes.k_scale.data_ptr(), planes.v_scale.data_ptr()
        self._held.append(planes)
        return out

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        views: Sequence[View],
        narrow: Mapping[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run all layers on all rows of a step, and store its keys and values.

        Args:
            token_ids: [N] int64.
            positions: [N] int64.
            views: one per layer; layers of a group may share one.
            narrow: see ``Decoder.forward``.

        Returns:
            [N', hidden] float32 after the final norm.
        """
        step = self._native.Step()
        step.rows, step.threads = len(token_ids), torch.get_num_threads()
        step.positions = positions.data_ptr()
        if self._tied:
            hidden = torch.empty(len(token_ids), self._decoder.spec.hidden_size)
            step.tokens = token_ids.data_ptr()
        else:
            hidden = self._decoder.ops.embedding(token_ids, self._decoder.embed)
            if self._decoder.spec.embed_scale != 1.0:
                hidden.mul_(self._decoder.spec.embed_scale)
        numbers: dict[int, int] = {}
        rows = len(token_ids)
        for i, view in enumerate(views):
            if id(view) not in numbers:
                numbers[id(view)] = len(numbers)
                step.view(_addresses(view))
            keep = narrow.get(i) if narrow else None
            if keep is None:
                step.layer(numbers[id(view)], 0, -1)
            else:
                rows = len(keep)
                step.layer(numbers[id(view)], keep.data_ptr(), rows)
        out = torch.empty(rows, hidden.shape[1])
        step.hidden, step.out = hidden.data_ptr(), out.data_ptr()
        self._model.forward(step)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [M, vocab] float32, of rows of ``forward``'s result. The next call overwrites
        them: memory of many megabytes that is new each time costs more than the product."""
        if len(self._room) < len(hidden):
            self._room = torch.empty(len(hidden), self._room.shape[1])
        return self._decoder.shape_logits(native_linear.product(hidden, self._head, self._room))

    def best(self, hidden: torch.Tensor) -> tuple[list[int], list[float]]:
        """Index and value of the largest logit of each row of ``forward``'s result: those of ``logits``."""
        if self._search is None or hidden.shape[0] > _SEARCHED_ROWS:
            return native_linear.argmax(self.logits(hidden))
        return self._search.best(hidden.data_ptr(), hidden.stride(0), hidden.shape[0], torch.get_num_threads())


def _addresses(view: View) -> list[int]:
    """A view as the C++ step takes it; what is pointed to is held by the view's batch."""
    batch = view.batch
    if "fused" not in batch.cache:
        flat = native.flatten(batch)
        early, late = _indices(view.early), _indices(view.late)
        batch.cache["fused"] = (early, late)
        segments, positions, slots, firsts, lasts = flat.segments, flat.positions, flat.slots, flat.firsts, flat.lasts
        batch.cache["addresses"] = [
            *(segments.data_ptr(), segments.shape[0], positions.data_ptr(), slots.data_ptr()),
            *(firsts.data_ptr(), lasts.data_ptr()),
            *(early[0].data_ptr(), early[1].data_ptr(), len(early[0])),
            *(late[0].data_ptr(), late[1].data_ptr(), len(late[0])),
        ]
    addresses: list[int] = batch.cache["addresses"]
    return addresses


def _indices(pair: tuple[Index, Index] | None) -> tuple[torch.Tensor, torch.Tensor]:
    if pair is None:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    rows, slots = (torch.arange(x.start, x.stop) if isinstance(x, slice) else x for x in pair)
    return rows, slots
