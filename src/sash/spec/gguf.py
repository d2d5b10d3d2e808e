"""A lazy reader of GGUF headers: metadata and tensor infos, straight from a memory map, without numpy or torch.

Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. Arrays (a vocabulary has hundreds of
thousands of entries) are only located while reading; they are decoded when asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sash.spec.errors import ModelError, enumerated
from sash.spec.ggml import BLOCKS, GgmlType

STRING, ARRAY = 8, 9
MAX_DIMS = 4
# Value type: code of the struct and array modules, bytes.
SCALARS: Mapping[int, tuple[str, int]] = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4),
    6: ("f", 4), 7: ("?", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip

# Keys that several readers use, and what their value must be: codes of array elements ("s" is a string), or a type.
KEY_TYPES: Mapping[str, str | type] = {
    "general.architecture": str, "split.count": int, "tokenizer.chat_template": str,
    "tokenizer.ggml.model": str, "tokenizer.ggml.pre": str, "tokenizer.ggml.tokens": "s",
    "tokenizer.ggml.merges": "s", "tokenizer.ggml.scores": "fd", "tokenizer.ggml.token_type": "bBhHiIqQ",
    **{f"tokenizer.ggml.{name}_token_id": int for name in ("bos", "eos", "eot", "eom", "unknown")},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape [out, in] (GGUF's own order reversed), offset from the start of the file, size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Where an array of the metadata lies: element type, length, and the byte range of its elements."""

    type: int
    length: int
    start: int
    stop: int


class GgufHeader(Mapping[str, Any]):
    """Metadata as a mapping (arrays become lists when first asked for) and ``tensors`` by name.

    Holds a read-only memory map of the file until it is garbage. ``truncated`` names the tensors whose bytes lie
    beyond the end of the file.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        reader = _Reader(path, buffer)
        self.path, self.buffer = path, buffer
        self.version, num_tensors, num_keys = reader.preamble()
        self._values = reader.metadata(num_keys)
        for key, want in KEY_TYPES.items():
            if key in self._values and not _has_type(self._values[key], want):
                kind = (
                    f"have type {want.__name__}" if isinstance(want, type) else "be a list of such entries as it names"
                )
                raise reader.broken(f"{key} must {kind}")
        self.alignment = self._values.get("general.alignment", 32)
        if not isinstance(self.alignment, int) or self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise reader.broken(f"general.alignment is {self.alignment!r}, must be a power of two")
        self.tensors = reader.tensors(num_tensors, self.alignment)
        self.truncated = tuple(t.name for t in self.tensors.values() if t.offset + t.nbytes > len(buffer))

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, GgufArray):
            value = self._values[key] = _Reader(self.path, self.buffer, key).decode(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: str, word: str) -> int | None:
        """Index of the first entry equal to ``word`` in the string array ``key``, without decoding the array."""
        value = self._values.get(key)
        if not isinstance(value, GgufArray):
            return value.index(word) if isinstance(value, list) and word in value else None
        size = len(word.encode())
        at, pos, index = value.start, value.start, 0
        while (at := self.buffer.find(struct.pack("<Q", size) + word.encode(), at, value.stop)) >= 0:
            while pos < at:
                pos += 8 + struct.unpack_from("<Q", self.buffer, pos)[0]
                index += 1
            if pos == at:
                return index
            at += 1
        return None

    def raw(self, key: str) -> memoryview | None:
        """The stored bytes of an array that is not decoded yet, for hashing; None for anything else."""
        value = self._values.get(key)
        return memoryview(self.buffer)[value.start : value.stop] if isinstance(value, GgufArray) else None

    def tensor_bytes(self, name: str) -> memoryview:
        """The stored bytes of a tensor. Raises ModelError when the file ends before them."""
        tensor = self.tensors[name]
        if name in self.truncated:
            raise ModelError(f"{self.path}: tensor {name} lies beyond the end of the file; copy or download it again")
        return memoryview(self.buffer)[tensor.offset : tensor.offset + tensor.nbytes]


def open_gguf(path: str | Path, *, partial: bool = False) -> GgufHeader:
    """Read the header of a GGUF file.

    Args:
        path: the file.
        partial: accept a file whose tensor data ends early (its header must be whole); see ``truncated``.

    Raises:
        ModelError: no such file, not GGUF, a damaged header, or (unless ``partial``) truncated tensors, all named.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        raise ModelError(f"{path} can't be read as a GGUF file ({error}); give the path of a .gguf file") from error
    header = GgufHeader(path, buffer)
    if header.truncated and not partial:
        names = list(header.truncated)
        raise ModelError(
            f"{path} is truncated: it ends at byte {len(buffer)}, but {len(names)} of {len(header.tensors)} tensors "
            f"need more: {enumerated(names)}. Copy or download the file again"
        )
    return header


def _has_type(value: Any, want: str | type) -> bool:
    if isinstance(want, type):
        return type(value) is want
    return isinstance(value, GgufArray) and ("s" if value.type == STRING else SCALARS[value.type][0]) in want


class _Reader:
    """A cursor over the mapped file; every read is checked against its end."""

    def __init__(self, path: Path, buffer: mmap.mmap, what: str = "header") -> None:
        self.path, self.buffer, self.pos, self.end, self.what = path, buffer, 0, len(buffer), what

    def broken(self, why: str) -> ModelError:
        return ModelError(
            f"{self.path} is not a usable GGUF file: {why} ({self.what}). Copy or download the file again"
        )

    def scalar(self, code: str, size: int) -> Any:
        self.need(size)
        (value,) = struct.unpack_from("<" + code, self.buffer, self.pos)
        self.pos += size
        return value

    def need(self, size: int) -> None:
        if size > self.end - self.pos:
            raise self.broken(f"it ends at byte {self.end}, {size} more are needed at byte {self.pos}")

    def string(self) -> str:
        size = self.scalar("Q", 8)
        self.need(size)
        self.pos += size
        try:
            return self.buffer[self.pos - size : self.pos].decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"the string at byte {self.pos - size} is not UTF-8") from error

    def preamble(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of metadata keys."""
        if self.buffer[:4] != b"GGUF":
            raise self.broken(f"it starts with {self.buffer[:4]!r} where b'GGUF' should be")
        self.pos = 4
        version = self.scalar("I", 4)
        if version not in (2, 3):
            why = "big-endian" if version & 0xFFFF == 0 else "not supported"
            raise self.broken(f"version {version} is {why}; little-endian versions 2 and 3 are")
        return version, self.scalar("Q", 8), self.scalar("Q", 8)

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for i in range(count):
            self.what = f"metadata key {i + 1} of {count}"
            key = self.string()
            self.what = f"metadata key {key!r}"
            if key in values:
                raise self.broken("the key occurs twice")
            values[key] = self.value(self.scalar("I", 4))
        return values

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.skip_array()
        if kind not in SCALARS:
            raise self.broken(f"unknown value type {kind}")
        return self.scalar(*SCALARS[kind])

    def skip_array(self) -> GgufArray:
        """Locate an array and move behind it."""
        kind, length = self.scalar("I", 4), self.scalar("Q", 8)
        start = self.pos
        if kind in SCALARS:
            self.need(SCALARS[kind][1] * length)
            self.pos += SCALARS[kind][1] * length
        elif kind == STRING:
            self.need(8 * length)
            unpack, buffer, pos = struct.Struct("<Q").unpack_from, self.buffer, start
            try:
                for _ in range(length):
                    pos += 8 + unpack(buffer, pos)[0]
            except (struct.error, OverflowError):
                pos = self.end + 1
            self.need(pos - start)
            self.pos = pos
        else:  # arrays of arrays are allowed by the format, but no writer makes them
            raise self.broken(f"unknown array type {kind}")
        return GgufArray(kind, length, start, self.pos)

    def decode(self, where: GgufArray) -> list[Any]:
        self.pos = where.start
        if where.type == STRING:
            return [self.string() for _ in range(where.length)]
        code = SCALARS[where.type][0]
        return list(struct.unpack_from(f"<{where.length}{code}", self.buffer, where.start))

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        found: list[GgufTensor] = []
        for i in range(count):
            self.what = f"tensor {i + 1} of {count}"
            name = self.string()
            self.what = f"tensor {name!r}"
            dims = self.scalar("I", 4)
            if dims > MAX_DIMS:
                raise self.broken(f"it has {dims} dimensions, at most {MAX_DIMS} are possible")
            shape = tuple(self.scalar("Q", 8) for _ in range(dims))[::-1]
            found.append(self.tensor(name, shape, self.scalar("I", 4), self.scalar("Q", 8)))
        base = -(-self.pos // alignment) * alignment
        placed = {t.name: GgufTensor(t.name, t.shape, t.type, base + t.offset, t.nbytes) for t in found}
        if len(placed) != len(found):
            raise self.broken("a tensor name occurs twice")
        return placed

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            block, size = BLOCKS[GgmlType(kind)]
        except ValueError as error:
            raise self.broken(f"unknown tensor type {kind}") from error
        if (shape[-1] if shape else 1) % block:
            raise self.broken(f"rows of {shape[-1]} don't divide into {GgmlType(kind).name} blocks of {block}")
        return GgufTensor(name, shape, GgmlType(kind), offset, prod(shape) // block * size)
