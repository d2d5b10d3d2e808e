"""Weights of a folder in Hugging Face form: safetensors, one file or several shards.

Every name and shape is checked against the spec from the files' headers before a byte of weights
is read, and everything wrong is listed in one error. Format: 8 bytes of little-endian header
length, a JSON header (name to dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sash.spec.errors import ModelError
from sash.spec.hf import quantization_of
from sash.spec.load import read_json
from sash.spec.model import ModelSpec
from sash.weights.check import check_weights
from sash.weights.load import Progress
from sash.weights.names import Target, targets

INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a file, as its header describes it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    num_bytes: int
    truncated: bool
    dtype: str


def load_safetensors(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Read a model's weights.

    Args:
        folder: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        spec: the model; decides names and shapes.
        dtype: of the result: float32, bfloat16 or float16.
        device: of the result.
        progress: called with ("weights", bytes read, bytes in all).

    Returns:
        Exactly ``expected_weights(spec)``, contiguous.

    Raises:
        ModelError: no safetensors (pickled weights are refused), weights that config.json calls
            quantised, a broken header, or a list of all missing, unexpected, wrongly shaped and
            truncated tensors.
    """
    _refuse_quantized(folder)
    entries = [entry for file in _files(folder) for entry in _header(file)]
    plan = _plan(entries, spec, str(folder))
    total = sum(entry.num_bytes for entry, _ in plan)
    out: dict[str, torch.Tensor] = {}
    done = 0
    for file in dict.fromkeys(entry.file for entry, _ in plan):
        with _open(file) as handle:
            for entry, goals in plan:
                if entry.file == file:
                    _place(handle.get_tensor(entry.name), goals, spec, out, dtype, device)
                    done += entry.num_bytes
                    if progress is not None:
                        progress("weights", done, total)
    return out


def _open(file: Path) -> Any:
    """The library's handle, which checks more than names and shapes."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is no safetensors file ({error}); download it again") from error


def _refuse_quantized(folder: Path) -> None:
    """Before a tensor is looked at: packed weights would only be called missing and unexpected."""
    config = folder / "config.json"
    if reason := quantization_of(read_json(config)) if config.is_file() else "":
        raise ModelError(f"{folder}: {reason}")


def _files(folder: Path) -> list[Path]:
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        return _shards(index)
    if single.is_file():
        return [single]
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    if files:
        return files
    pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder} holds pickled weights ({pickled[0]}), which can run code when they are loaded: convert them "
            "with transformers' save_pretrained, or download the model's safetensors files"
        )
    raise ModelError(f"{folder} holds no weights: expected model.safetensors or {INDEX} with its shards")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index} is broken ({error!r}); download it again") from error
    inside = [name for name in names if isinstance(name, str) and Path(name).name == name and len(name) < 256]
    if len(inside) < len(names):
        raise ModelError(
            f"weight_map in {index} must name files beside it, got {sorted(set(names) - set(inside))[0]!r}"
        )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}; download them"
        )
    return [index.parent / name for name in names]


def _header(file: Path) -> list[_Entry]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        if not isinstance(header, dict):
            raise ModelError(f"{file} is no complete safetensors file (its header is cut off); download it again")
        return [_entry(file, name, item, size - 8 - length) for name, item in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{file} is no safetensors file ({error}); download it again") from error


def _entry(file: Path, name: str, item: Mapping[str, Any], data_bytes: int) -> _Entry:
    shape, (start, end) = tuple(item["shape"]), item["data_offsets"]
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in (*shape, start, end - start)):
        raise ValueError(f"{name} has shape {list(shape)} and bytes {start} to {end}")
    return _Entry(file, name, shape, end - start, end > data_bytes, item["dtype"])


def _plan(entries: list[_Entry], spec: ModelSpec, source: str) -> list[tuple[_Entry, tuple[Target, ...]]]:
    """What to read and where it goes, once everything is known to fit."""
    found: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    experts: dict[str, set[int]] = {}
    plan = []
    for entry in entries:
        goals = targets(entry.name, spec)
        if goals is None:
            found[entry.name] = entry.shape
            continue
        if goals and entry.dtype not in FLOATS:
            raise ModelError(
                f"{entry.name} in {entry.file} is {entry.dtype}; sash reads {', '.join(FLOATS)} safetensors"
            )
        for goal in goals:
            names[goal.name] = entry.name
            found[goal.name] = _shape(entry.shape, goal)
            if goal.expert is not None:
                members = experts.setdefault(goal.name, set())
                members.add(goal.expert)
                found[goal.name] = (len(members), *found[goal.name])
        if goals:
            plan.append((entry, goals))
    truncated = [entry.name for entry in entries if entry.truncated]
    check_weights(found, spec, source=source, names=names, truncated=truncated)
    return plan


def _shape(shape: tuple[int, ...], goal: Target) -> tuple[int, ...]:
    """Shape after ``take``; the file's own where it has too few dimensions to be taken apart."""
    try:
        return tuple(goal.take(torch.empty(shape, device="meta")).shape)
    except (IndexError, RuntimeError):
        return shape


def _place(
    tensor: torch.Tensor,
    goals: tuple[Target, ...],
    spec: ModelSpec,
    out: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Copy a file's tensor to where it goes; nothing of the result points into the file."""
    for goal in goals:
        part = goal.take(tensor)
        if goal.expert is None:
            out[goal.name] = torch.empty(part.shape, dtype=dtype, device=device).copy_(part)
            continue
        if goal.name not in out:
            experts = (spec.layers[int(goal.name.split(".")[1])].mlp.num_experts, *part.shape)
            out[goal.name] = torch.empty(experts, dtype=dtype, device=device)
        out[goal.name][goal.expert].copy_(part)
