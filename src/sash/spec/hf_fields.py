"""Typed reading of a config.json: every complaint names the field and what would do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sash.spec.errors import ModelError


class Fields:
    """A config with the defaults that its architecture gives to absent fields.

    Configs on disk leave out what equals a default, so a family's defaults are part of its meaning.
    An explicit null stays null for ``get`` and means the default for the typed readers.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], architecture: str) -> None:
        self._config, self._defaults = config, defaults
        self.architecture = architecture

    def given(self, name: str) -> bool:
        """Whether the config itself holds ``name`` with a value."""
        return self._config.get(name) is not None

    def mentioned(self, name: str) -> bool:
        """Whether the config itself holds ``name``, be it with null."""
        return name in self._config

    def get(self, name: str) -> Any:
        """The config's value, null included, or the architecture's default, or None."""
        return self._config[name] if name in self._config else self._defaults.get(name)

    def source(self, name: str) -> str:
        """How to name where ``get(name)`` came from."""
        return name if name in self._config else f"{name} (default of {self.architecture})"

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of ``least`` or more."""
        value = self._or_default(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, value, f"a whole number of {least} or more")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """A finite number above ``above``."""
        value = self._or_default(name, default)
        want = "a finite number" if above == -math.inf else f"a finite number above {above:g}"
        try:
            good = not isinstance(value, bool) and isinstance(value, (int, float)) and above < float(value) < math.inf
        except OverflowError:  # a whole number beyond any float
            good = False
        if not good:
            raise self.error(name, value, want)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._or_default(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self._or_default(name, None)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, several, or none."""
        value = self.get(name)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(name, value, "a token id, a list of token ids or null")
        return ids

    def error(self, name: str, value: object, want: str) -> ModelError:
        """The complaint about one field."""
        if value is None:
            return ModelError(f"config.json of {self.architecture} lacks {name}: it must be {want}")
        return ModelError(f"{name} in config.json must be {want}, got {value!r}")

    def _or_default(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = self._defaults.get(name)
        return default if value is None else value
