"""The C++ kernels' Python side: checks, and addresses instead of tensors, because a call per layer must be cheap."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType

import torch

from sash.kv import storage
from sash.kv.storage import KVRows, Planes
from sash.ops import attention_torch
from sash.ops.paged import PagedBatch
from sash.spec.errors import ConfigError

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
# Types of queries, each with those of the rows that the kernel reads for them.
_ROWS = {torch.float32: (torch.float32, torch.bfloat16, torch.int8), torch.bfloat16: (torch.bfloat16, torch.int8)}
ISAS = ("avx512", "avx2", "portable")


def load() -> tuple[ModuleType | None, str]:
    """The extension, or None and why there is none. ``SASH_ISA`` forces an instruction set.

    Raises:
        ConfigError: SASH_ISA names one that this processor or sash lacks.
    """
    try:
        import sash._native as _native
    except ImportError as error:
        return None, f"the C++ kernels are not built ({error}); install sash with a C++ compiler at hand"
    wanted = os.environ.get("SASH_ISA")
    if wanted:
        try:
            _native.set_isa(wanted)
        except ValueError as error:
            raise ConfigError(f"SASH_ISA={wanted!r}: {error}; use one of {', '.join(ISAS)}, or leave it out") from error
    return _native, _native.isa()


@dataclass(frozen=True, slots=True)
class Flat:
    """A batch as the kernel reads it, int64: segments [S, 9], positions and slots of all past rows, and
    each query's first and last visible position [Nq]."""

    segments: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor
    lasts: torch.Tensor


def flatten(batch: PagedBatch) -> Flat:
    if "native" not in batch.cache:
        segments, past = [], 0
        firsts, lasts = [], []
        for seg in batch.segments:
            count = len(seg.past_slots)
            segments.append(
                (
                    *(seg.q_row, seg.q_start, seg.q_count, seg.kv_row, seg.kv_start, seg.kv_count),
                    *(past, count, seg.bound.sinks),
                )
            )
            past += count
            first, last = seg.bounds(0, seg.q_count)
            firsts.append(first)
            lasts.append(last)
        batch.cache["native"] = Flat(
            torch.tensor(segments, dtype=torch.int64),
            torch.cat([s.past_positions for s in batch.segments]).contiguous(),
            torch.cat([s.past_slots for s in batch.segments]).contiguous(),
            torch.cat(firsts).to(torch.int64),
            torch.cat(lasts).to(torch.int64),
        )
    out: Flat = batch.cache["native"]
    return out


def attention(
    q: torch.Tensor,
    rows: KVRows,
    planes: Planes,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float = 0.0,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``sash.ops.attention_reference.attention``. float32 and bfloat16 on the CPU run in the kernel,
    everything else in torch."""
    stored = planes.k.dtype
    if q.device.type != "cpu" or stored not in _ROWS.get(q.dtype, ()) or planes.v.dtype is not stored:
        return attention_torch.attention(q, rows, planes, batch, scale=scale, softcap=softcap, sink_logits=sink_logits)
    import sash._native as _native

    out = torch.empty(q.shape[0], q.shape[1], rows.v.shape[2], dtype=q.dtype)
    lse = torch.empty(q.shape[0], q.shape[1])
    if not q.shape[0]:
        return out, lse
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, rows.k, rows.v))
    scales = (rows.k_scale, rows.v_scale, planes.k_scale, planes.v_scale)
    flat = flatten(batch)
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    address = [
        *(x.data_ptr() for x in (q, k, v, planes.k, planes.v, out, lse)),
        0 if sinks is None else sinks.data_ptr(),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(planes.k.shape[1], k.shape[1], q.shape[1] // k.shape[1], q.shape[2], v.shape[2]),
        *(flat.segments.data_ptr(), flat.segments.shape[0], flat.positions.data_ptr(), flat.slots.data_ptr()),
        *(flat.firsts.data_ptr(), flat.lasts.data_ptr(), torch.get_num_threads()),
        TYPES[stored],
        *(0 if x is None else x.data_ptr() for x in scales),
    ]
    _native.attention(address, scale, softcap, TYPES[q.dtype])
    return out, lse


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``sash.kv.storage.quantise``; the same bits."""
    if x.dtype not in _ROWS or x.device.type != "cpu" or x.stride(-1) != 1:
        return storage.quantise(x)
    import sash._native as _native

    out, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[:2])
    address = [x.data_ptr(), out.data_ptr(), scale.data_ptr(), *x.shape, x.stride(0), x.stride(1)]
    _native.quantise([*address, TYPES[x.dtype], torch.get_num_threads()])
    return out, scale
