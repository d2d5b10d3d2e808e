"""Sizes as people write them."""

from __future__ import annotations

import re

from sash.spec.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(option: str, text: str) -> int:
    """``512MiB``, ``2G`` or a plain number of bytes.

    Raises:
        ConfigError: it is none of these; ``option`` is named.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if not match:
        raise ConfigError(f"{option} must be a size such as 512MiB, 2G or 1000000, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2] or ""])
