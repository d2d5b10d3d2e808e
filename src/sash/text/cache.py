"""Files that are slow to make, kept in the user's cache folder.

A file carries a digest of its content: a truncated or damaged one is made again. Writers put the whole file in place
under its final name at once, so any number of processes may do it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from sash.spec.errors import ModelError
from sash.spec.files import write_whole
from sash.spec.locate import cache_dir
from sash.spec.log import logger

MAGIC = b"sash-cache-1\n"
DIGEST_BYTES = 16


def cached(kind: str, key: str, build: Callable[[], bytes]) -> bytes:
    """The bytes stored under ``kind`` and ``key`` (both safe in file names), or what ``build`` makes, then stored.

    A folder that can't be written costs time, not the answer: a warning is logged.
    """
    try:
        path = cache_dir() / f"{kind}-{key}"
    except ModelError as error:
        logger().warning(str(error))
        return build()
    data = _read(path)
    if data is None:
        data = build()
        try:
            write_whole(path, [MAGIC + _digest(data) + data])
        except OSError as error:
            logger().warning(f"{path} can't be written ({error}); set SASH_CACHE_DIR to a folder that can")
    return data


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _read(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + DIGEST_BYTES
    data = stored[start:]
    return data if stored[:start] == MAGIC + _digest(data) else None
