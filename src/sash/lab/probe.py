"""One pass of a text through a model's layers, with a look at what each layer saw; nothing is stored in pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sash.kv.storage import KVRows, Planes
from sash.lab.context import Weights
from sash.ops.paged import PagedBatch, Segment
from sash.spec.model import LayerSpec, ModelSpec
from sash.spec.span import Span

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Attended:
    """What one layer's attention took and gave: q and out [N, Hq, D], k and v [N, H, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


# attention(layer, q, k, v, sink_logits) -> out, over all rows of the text at once.
Attention = Callable[[LayerSpec, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def in_hand(span: Span, count: int) -> PagedBatch:
    """A batch of one text of ``count`` tokens whose keys are all in hand."""
    return PagedBatch((Segment(span.bind(count), 0, 0, count, 0, 0, count, _NONE, _NONE),))


def no_planes(k: torch.Tensor, v: torch.Tensor) -> Planes:
    """Planes without a slot, of the types and shapes of k and v [N, H, D]."""
    return Planes(*(torch.empty(x.shape[1], 0, x.shape[2], dtype=x.dtype) for x in (k, v)))


@torch.inference_mode()
def trace(
    weights: Weights,
    ids: Sequence[int],
    spec: ModelSpec | None = None,
    *,
    attention: Attention | None = None,
    attended: Callable[[int, Attended], None] | None = None,
    watch: Callable[[int, torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """Run a text through all layers, op by op.

    Args:
        weights: the model.
        ids: the text's token ids [N].
        spec: the model with other spans; None: its own.
        attention: in place of the engine's kernel.
        attended: called for each layer with what its attention took and gave.
        watch: called for each layer with the residual stream [N, hidden] float32, valid during the call.

    Returns:
        [N, hidden] after the final norm.
    """
    layers = (spec or weights.spec).layers
    batches: dict[Span, PagedBatch] = {}

    def kernel(
        layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        batch = batches.setdefault(layer.span, in_hand(layer.span, len(ids)))
        out, _ = weights.ops.attention(
            *(q, KVRows(k, v), no_planes(k, v), batch), scale=layer.scale, softcap=layer.softcap, sink_logits=sinks
        )
        mixed: torch.Tensor = out
        return mixed

    def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        out = (attention or kernel)(layers[i], q, k, v, sinks)
        if attended is not None:
            attended(i, Attended(q, k, v, out))
        return out

    tokens = torch.tensor(list(ids))
    return weights.decoder.forward(tokens, torch.arange(len(ids)), attend, watch=watch)
