"""Which processors compute, and how many threads."""

from __future__ import annotations

import os
from functools import cache

import torch

from sash.ops.base import Ops
from sash.spec.config import EngineConfig
from sash.spec.errors import ConfigError


def use_processors(options: EngineConfig, ops: Ops) -> None:
    """Set the process's threads, and pin those of the C++ kernels, where the options ask for it.

    Raises:
        ConfigError: more threads than processors, a processor that isn't there or not ours, or kernels whose
            threads can't be pinned.
    """
    own = _own()
    if options.threads is not None and options.threads > len(own):
        raise ConfigError(f"threads={options.threads} is more than there are processors; use at most {len(own)}")
    wanted = options.processors()
    if missing := sorted(set(wanted) - set(own)):
        raise ConfigError(
            f"cpu_affinity={options.cpu_affinity}: there is no processor {missing[0]} for this process; "
            f"use some of {','.join(map(str, own))}"
        )
    if wanted and ops.name != "native":
        raise ConfigError("cpu_affinity pins the threads of the C++ kernels, which don't run here; leave it out")
    _set_threads(options.threads or len(wanted))
    _pin(wanted)


# How many threads torch had before an engine asked for another number; None: nobody has asked.
_usual_threads: int | None = None
_pinned = False


def _set_threads(count: int) -> None:
    """So many threads; 0: as many as there were before an engine asked for some."""
    global _usual_threads
    if count:
        _usual_threads = _usual_threads or torch.get_num_threads()
        torch.set_num_threads(count)
    elif _usual_threads is not None:
        torch.set_num_threads(_usual_threads)
        _usual_threads = None


def _pin(processors: list[int]) -> None:
    """Keep the kernels' threads on processors; none: let them go where they like, should they be pinned."""
    global _pinned
    if processors or _pinned:
        import sash._native as _native

        _native.pin(processors)
        _pinned = bool(processors)


@cache
def _own() -> list[int]:
    """This process's processors, as they were before a thread was pinned."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
