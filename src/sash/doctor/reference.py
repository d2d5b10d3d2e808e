"""An independent dense run of the model under examination: no cache, no pages, masks and angles of its own.

Only the products and norms are the engine's (its weights may be packed and rounded), so that what differs is the
cache, the mask, the positions or the attention.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from sash.doctor.rule import sees
from sash.engine.runner import Runner
from sash.kv.storage import key_block, quantise, restored
from sash.models.decoder import Decoder
from sash.models.rope import Rope
from sash.ops.packed import rotate
from sash.spec.model import ModelSpec
from sash.spec.span import Span

# Queries whose products with all keys exist at once.
_BLOCK = 256
# Rows of logits that exist at once.
_ROWS = 64


class OwnRope:
    """Angles of absolute positions, from the model's frequencies alone."""

    def __init__(self, rope: Rope) -> None:
        self._inv_freq, self._factor = rope.inv_freq, rope.factor

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [N, rotary_dim / 2] of positions [N]; float64 inside."""
        angles = positions[:, None].double() * self._inv_freq.double()
        return (angles.cos() * self._factor).float(), (angles.sin() * self._factor).float()


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [N, H, D] by angles [N, R/2] (arXiv 2104.09864); dimensions from R on stay."""
    half = cos.shape[-1]
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    left, right = a * cos - b * sin, b * cos + a * sin
    both = torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)
    return torch.cat((both, rest), -1)


@dataclass
class Reference:
    """The model of a runner, run densely."""

    decoder: Decoder
    spec: ModelSpec
    stored: tuple[torch.dtype, ...]  # per layer, of its pool
    # Noise on what attention gives, as a share of it: shows how far rounding may carry scores.
    jitter: float = 0.0

    @classmethod
    def of(cls, runner: Runner) -> Reference:
        """A reference that shares the runner's weights; the runner is not changed."""
        decoder = copy.copy(runner.decoder)
        decoder.ropes = [OwnRope(rope) for rope in decoder.ropes]  # type: ignore[misc]
        decoder.layers = [copy.copy(layer) for layer in decoder.layers]
        for layer in decoder.layers:
            layer.rope_op = turn
        dtypes = {layer: pool.k.dtype for layer, pool in runner.layer_pools()}
        return cls(decoder, decoder.spec, tuple(dtypes[i] for i in range(len(decoder.layers))))

    def jittered(self, rounded_weights: bool) -> Reference:
        """The same with as much noise as the engine's rounding makes."""
        return replace(self, jitter=2**-7 if rounded_weights else torch.finfo(self.decoder.dtype).eps)

    @torch.inference_mode()
    def scores(
        self, tokens: Sequence[int], prompt_tokens: int, rows: Sequence[int], wanted: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Log-probabilities of some tokens that may follow ``tokens[: row + 1]``: for each of ``rows`` those of its
        token ids in ``wanted``, float32."""
        ids = torch.tensor(tokens, device=self.decoder.device)
        masks: dict[Span, torch.Tensor] = {}

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            span = self.spec.layers[layer].span
            if span not in masks:
                masks[span] = mask(span, prompt_tokens, len(ids)).to(q.device)
            return self._attention(layer, q, k, v, sinks, masks[span])

        hidden = self.decoder.forward(ids, torch.arange(len(ids), device=ids.device), attend)
        out: list[torch.Tensor] = []
        for part in torch.tensor(rows, device=ids.device).split(_ROWS):
            scored = self.decoder.logits(hidden[part]).log_softmax(-1).cpu()
            out += [row[torch.tensor(wanted[len(out) + i])] for i, row in enumerate(scored)]
        return out

    def _attention(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        own = self.spec.layers[layer]
        groups = own.num_heads // own.num_kv_heads
        k, v = self._rounded(layer, k, is_key=True), self._rounded(layer, v, is_key=False)
        keys = k.float().repeat_interleave(groups, 1).transpose(0, 1)
        values = v.float().repeat_interleave(groups, 1).transpose(0, 1)
        parts = []
        for start in range(0, len(q), _BLOCK):
            rows = slice(start, start + _BLOCK)
            scores = q[rows].float().transpose(0, 1) @ keys.transpose(1, 2) * own.scale
            if own.softcap:
                scores = torch.tanh(scores / own.softcap) * own.softcap
            scores = scores.masked_fill(~seen[rows], -math.inf)
            if sinks is not None:
                extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, extra), -1)
            weights = scores.softmax(-1)[..., : len(k)]
            parts.append((weights @ values).transpose(0, 1))
        out = torch.cat(parts)
        if self.jitter:
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(layer)).to(out.device)
            out = out * (1 + self.jitter * noise)
        return out.to(q.dtype)

    def _rounded(self, layer: int, x: torch.Tensor, *, is_key: bool) -> torch.Tensor:
        """Rows [N, H, D] as the layer's pool would give them back."""
        dtype = self.stored[layer]
        if dtype != torch.int8:
            return x.to(dtype)
        if not is_key:
            return restored(*quantise(x), torch.float32)
        block = min(x.shape[-1] & -x.shape[-1], 256)
        return rotate(restored(*quantise(rotate(x.float(), block)), torch.float32), block)

    @torch.inference_mode()
    def first_layer_keys(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor | None:
        """Keys [T, H, D] that the first layer makes of tokens at positions: they depend on nothing else.

        None where that layer has no angles.
        """
        if self.spec.layers[0].rope is None:
            return None
        caught: list[torch.Tensor] = []

        class _Caught(Exception):
            pass

        def attend(
            _layer: int, _q: torch.Tensor, k: torch.Tensor, _v: torch.Tensor, _sinks: torch.Tensor | None
        ) -> torch.Tensor:
            caught.append(k.float())
            raise _Caught

        device = self.decoder.device
        with suppress(_Caught):
            self.decoder.forward(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), attend)
        return caught[0]


def stored_keys(runner: Runner, slots: Sequence[int]) -> torch.Tensor:
    """The first layer's keys at slots [n] as numbers: [n, H, D] float32."""
    planes = next(pool for layer, pool in runner.layer_pools() if layer == 0).layers[0]
    index = torch.tensor(slots, device=planes.k.device)
    scale = None if planes.k_scale is None else planes.k_scale[:, index]
    keys = restored(planes.k[:, index], scale, torch.float32).transpose(0, 1)
    return rotate(keys, key_block(planes))


def mask(span: Span, prompt_tokens: int, count: int) -> torch.Tensor:
    """Who sees whom: bool [count queries, count keys]."""
    positions = torch.arange(count)
    seen: torch.Tensor = sees(span, prompt_tokens, positions[:, None], positions[None])
    return seen
