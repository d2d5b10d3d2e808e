"""Which experiments there are, in the order of the report. Loading one imports torch; naming it doesn't."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module

from sash.lab.experiment import Experiment
from sash.spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an experiment is: ``module`` of ``sash.lab`` has it as ``attribute``. ``group`` names several at once;
    ``summary`` is for help."""

    module: str
    group: str
    summary: str
    attribute: str = "EXPERIMENT"


ENTRIES: dict[str, Entry] = {
    "edge": Entry("edge", "edge", "attention weight by distance: exactly zero from W on"),
    "against": Entry("against", "against", "error and agreement against full attention and against a plain mask"),
    "ring-layer": Entry("ring_layer", "ring", "one layer alone: ring, full storage, shift-left, re-computation"),
    "ring": Entry("ring", "ring", "a real model with its window rows in a ring, in full, shifted, or not stored"),
    "ring-long": Entry("ring_long", "ring", "20 000 tokens in a row through the ring"),
    "window-sweep": Entry("sweep", "window-sweep", "quality and memory with windows of 64 to 4096"),
    "reach-toy": Entry("reach", "reach", "how far a token's influence gets through random stacks", "TOY"),
    "reach": Entry("reach", "reach", "the same in the real model"),
    "myth-mask": Entry("myths", "myths", "does a window mask save memory?", "MASK"),
    "myth-growth": Entry("myths", "myths", "does memory stop growing?", "GROWTH"),
    "myth-speed": Entry("myths", "myths", "are windows faster at every length?", "SPEED"),
    "myth-facts": Entry("needle", "myths", "do stacked windows remember distant facts?"),
    "memory": Entry("memory", "memory", "bytes by the formula, of the pools, and in the process"),
    "chunk": Entry("chunk", "chunk", "speed and memory by the size of a prompt's chunks, and the same answer"),
    "stall": Entry("stall", "stall", "longest wait for a token while a long prompt is read"),
    "batch": Entry("batch", "batch", "a request alone and in batches: the same bits, and no padding"),
    "batch-speed": Entry("batch_speed", "batch", "tokens a second by the number of requests"),
    "ratio": Entry("ratio", "ratio", "given ratios of the two pools against the automatic split"),
}
ALL = "all"


def groups() -> dict[str, list[str]]:
    """Group to its experiments, in order; ``all`` comes last."""
    out: dict[str, list[str]] = {}
    for name, entry in ENTRIES.items():
        out.setdefault(entry.group, []).append(name)
    return {**out, ALL: list(ENTRIES)}


def chosen(words: list[str]) -> tuple[list[str], str | None]:
    """Experiments that ``words`` name, in the report's order and each once; and the model, where the last word is none
    of them.

    Raises:
        ConfigError: no experiment is named, or a word before the last one is none.
    """
    known = groups() | {name: [name] for name in ENTRIES}
    *names, last = words or [""]
    model = None if last in known or not last else last
    for word in names if model else words:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"no experiment is called {word!r}{hint}; there are {', '.join(known)}")
    wanted = {name for word in (names if model else words) for name in known[word]}
    if not wanted:
        raise ConfigError(
            f"{model!r} is no experiment; there are {', '.join(known)}. A model stands behind one: sash lab all {model}"
        )
    return [name for name in ENTRIES if name in wanted], model


def load(name: str) -> Experiment:
    """The experiment of that name."""
    entry = ENTRIES[name]
    experiment: Experiment = getattr(import_module(f"sash.lab.{entry.module}"), entry.attribute)
    return experiment
