"""Converted weights on disk, so that a second start reads instead of converting.

A file: ``MAGIC``, the digest of a JSON header (32 hex digits), its length (8 bytes, little-endian), the header, zeros
up to a multiple of 64 bytes, and the tensors, each at a multiple of 64. The header says what the weights were made of
(``identity``), where each tensor lies, and two sums for each block of ``BLOCK`` bytes, which cost a pass each at memory
speed and tell a damaged file. A file that doesn't fit is ignored and written anew.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import fields
from hashlib import blake2b
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import torch

from sash.ops.base import Weight
from sash.ops.packed import PackedLinear
from sash.spec.errors import ModelError
from sash.spec.files import write_whole
from sash.spec.locate import cache_dir
from sash.spec.log import logger
from sash.weights.load import Progress

MAGIC = b"sash-weights-2\n\0"
ALIGNMENT = 64
DIGEST_BYTES = 32
# Bytes per checksum; also what is read at once between two reports of progress.
BLOCK = 1 << 24
# Words in a line of a block.
_LINE = 1024
_PART_SECONDS = 3600
# Smaller models are converted in no time.
MIN_BYTES = 1 << 26


class WeightCache:
    """The converted weights of one model in one form.

    Args:
        source: the GGUF file or folder that they are made of.
        variant: what may lie side by side on disk, safe in file names: int8-bfloat16.
        form: everything else that decides what they are: a newer form replaces an older one.
    """

    def __init__(self, source: Path, variant: str, form: str) -> None:
        # An index says which shards count.
        patterns = ("*.safetensors", "*.safetensors.index.json")
        files = sorted(file for p in patterns for file in source.glob(p)) if source.is_dir() else [source]
        # Copies may bring their time of change along, but not when they came here.
        stats = [(file.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file in files for s in (file.stat(),)]
        self.identity = json.dumps([str(source.resolve()), stats, variant, form])
        self._family = f"weights-{_digest(str(source.resolve()))}-{variant}"
        self._name = f"{self._family}-{_digest(self.identity)}"

    def load(self, progress: Progress | None = None) -> dict[str, Weight] | None:
        """What ``save`` was given, bit for bit; None where there is nothing, or nothing whole (a line is logged)."""
        try:
            path = cache_dir() / self._name
        except ModelError:
            return None
        try:
            with path.open("rb", buffering=0) as file:
                header = _read_header(file, os.fstat(file.fileno()).st_size)
                if header["identity"] != self.identity:
                    raise ValueError("they belong to another model")
                data = _read(file, header["bytes"], progress)
            if [list(pair) for pair in _sums(data)] != header["sums"]:
                raise ValueError("their bytes are damaged")
            out = {name: _restore(item, data) for name, item in header["weights"].items()}
            return {name: out[first] for name, first in header["names"].items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            logger().warning(f"converted weights in {path} are ignored and made again: {error}")
            return None

    def save(self, weights: Mapping[str, Weight]) -> None:
        """Write them for the next start, and remove what older versions of the source have left.

        A folder that can't be written or a full disk costs time at the next start: a line is logged.
        """
        firsts: dict[int, str] = {}
        names = {name: firsts.setdefault(id(weight), name) for name, weight in weights.items()}
        tensors: list[tuple[int, torch.Tensor]] = []
        described = {name: _describe(weights[name], tensors) for name in firsts.values()}
        size = _end(tensors)
        if size < MIN_BYTES:
            return
        data = torch.zeros(size, dtype=torch.uint8)
        for start, tensor in tensors:
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            data[start : start + len(flat)] = flat
        header = {
            "identity": self.identity,
            "bytes": size,
            "sums": _sums(data),
            "weights": described,
            "names": names,
        }
        try:
            folder = cache_dir()
            write_whole(folder / self._name, [_header_bytes(header), data.numpy().data])
            for old in folder.glob(f"{self._family}-*"):
                if old.name != self._name and not _being_written(old):
                    old.unlink(missing_ok=True)
        except (OSError, ModelError) as error:
            logger().warning(f"converted weights can't be kept for the next start: {error}")


def _being_written(path: Path) -> bool:
    """Whether a file is a part of somebody who writes at this moment, and not of a process that was killed."""
    if path.suffix != ".part":
        return False
    try:
        return time.time() - path.stat().st_mtime < _PART_SECONDS
    except FileNotFoundError:  # it has just got its name
        return True


def _digest(text: str | bytes) -> str:
    return blake2b(text.encode() if isinstance(text, str) else text, digest_size=DIGEST_BYTES // 2).hexdigest()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _end(tensors: list[tuple[int, torch.Tensor]]) -> int:
    return _aligned(tensors[-1][0] + tensors[-1][1].nbytes) if tensors else 0


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    whole = MAGIC + _digest(text).encode() + len(text).to_bytes(8, "little") + text
    return whole + bytes(-len(whole) % ALIGNMENT)


def _read_header(file: RawIOBase, size: int) -> dict[str, Any]:
    """The header; ``file`` stands at the tensors then. Raises ValueError where it is damaged or the file cut off."""
    fixed = len(MAGIC) + DIGEST_BYTES + 8
    front = file.read(fixed) or b""
    length = int.from_bytes(front[-8:], "little")
    text = file.read(length) or b"" if len(front) == fixed and length < size else b""
    if front[:-8] != MAGIC + _digest(text).encode():
        raise ValueError("they begin with something else")
    header: dict[str, Any] = json.loads(text)
    start = _aligned(fixed + length)
    if start + header["bytes"] != size:
        raise ValueError("they are cut off")
    file.seek(start)
    return header


def _read(file: RawIOBase, size: int, progress: Progress | None) -> torch.Tensor:
    """The next ``size`` bytes in memory of large pages: a decoder that streams its weights misses fewer of them."""
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    view, done = memoryview(memory), 0
    while done < size:
        count = file.readinto(view[done : done + BLOCK])
        if not count:
            raise ValueError("they are cut off")
        done += count
        if progress is not None:
            progress("weights", done, size)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _sums(data: torch.Tensor) -> list[tuple[int, int]]:
    """Each block's words (padded with zeros to lines of ``_LINE``), summed by column and by line, with odd numbers as
    weights: words in another order give other sums."""
    odd = torch.arange(1, 2 * max(_LINE, BLOCK // 8 // _LINE), 2)

    def weighted(sums: torch.Tensor) -> int:
        return int((sums * odd[: len(sums)]).sum())

    out = []
    for block in data.view(torch.int64).split(BLOCK // 8):
        lines = torch.nn.functional.pad(block, (0, -len(block) % _LINE)).view(-1, _LINE)
        out.append((weighted(lines.sum(0)), weighted(lines.sum(1))))
    return out


def _describe(weight: Weight, tensors: list[tuple[int, torch.Tensor]]) -> dict[str, Any]:
    """A weight as the header has it; its tensors are added to ``tensors`` with their places."""

    def place(tensor: torch.Tensor) -> list[Any]:
        start = _end(tensors)
        tensors.append((start, tensor))
        return [start, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    if isinstance(weight, torch.Tensor):
        return {"tensor": place(weight)}
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    parts = {name: place(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {"parts": parts, "plain": {n: v for n, v in values.items() if not isinstance(v, torch.Tensor)}}


def _restore(item: Mapping[str, Any], data: torch.Tensor) -> Weight:
    def tensor(place: list[Any]) -> torch.Tensor:
        start, dtype, shape = place
        kind: torch.dtype = getattr(torch, dtype)
        return data[start : start + prod(shape) * kind.itemsize].view(kind).view(shape)

    if "tensor" in item:
        return tensor(item["tensor"])
    parts: dict[str, Any] = {name: tensor(place) for name, place in item["parts"].items()}
    return PackedLinear(**item["plain"], **parts)
