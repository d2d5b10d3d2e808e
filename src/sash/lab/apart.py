"""Measurements in a process of their own, where nothing that was done before counts as memory: ``python -m
sash.lab.apart MODULE:FUNCTION JSON``."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from sash.bench.memory import resident_bytes
from sash.lab.context import Context
from sash.spec.errors import SashError

# Large blocks get memory of their own from glibc and give it back. Else a new block could lie where an old one was, and
# bytes that nobody has written yet would count as resident.
_FRESH = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_RESET_PEAK = "5"  # proc(5): what to write to clear_refs
_NO_HUGE_PAGES = 41  # prctl(2), PR_SET_THP_DISABLE


def apart(measure: Callable[..., Any], context: Context, **arguments: Any) -> Any:
    """What ``measure(context, **arguments)`` returns in a fresh process with the same model, threads and options.

    Arguments and result travel as JSON.

    Raises:
        SashError: the process failed.
    """
    given = {
        "model": context.model,
        "threads": context.threads,
        "options": context.options,
        "seed": context.seed,
        "arguments": arguments,
    }
    name = f"{measure.__module__}:{measure.__name__}"
    command = [sys.executable, "-m", "sash.lab.apart", name, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **_FRESH})
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise SashError(f"the process that measures memory ended with {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def here(measure: Callable[..., Any], context: Context, **arguments: Any) -> Any:
    """The same in this process, for what doesn't depend on what was done before."""
    return json.loads(json.dumps(measure(context, **arguments)))


def bytes_at_rest() -> int:
    """Resident memory of this process without what is free but not given back yet: the next to allocate would get
    that, and nobody would see it."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # the C library is another one
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def peak_bytes(reset: bool = False) -> int:
    """Most memory that was resident at once in this process (Linux), since its start or the last ``reset``. Where the
    system lets nobody reset it, it stays that since the start."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return max(int(line.split()[1]) * 1024, resident_bytes())
    raise OSError("/proc/self/status has no VmHWM")


def main(name: str, text: str) -> None:
    """Measure, and print the result as JSON."""
    with contextlib.suppress(AttributeError):  # another system
        # One byte written would bring 2 MiB into memory.
        ctypes.CDLL(None).prctl(_NO_HUGE_PAGES, 1, 0, 0, 0)
    given = json.loads(text)
    module, function = name.split(":")
    context = Context(given["model"], threads=given["threads"], options=given["options"], seed=given["seed"])
    result = getattr(import_module(module), function)(context, **given["arguments"])
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
