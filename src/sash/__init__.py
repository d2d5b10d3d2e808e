"""sash: sliding-window LLM inference. ``import sash`` loads no torch; the names below load when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sash.engine.llm import LLM
    from sash.engine.outputs import RequestOutput
    from sash.spec.errors import SashError
    from sash.spec.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "SashError", "__version__"]

_HOMES = {
    "LLM": "sash.engine.llm",
    "RequestOutput": "sash.engine.outputs",
    "SamplingParams": "sash.spec.sampling",
    "SashError": "sash.spec.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sash' has no attribute {name!r}; it exports {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
