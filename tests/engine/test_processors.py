"""Threads and the processors that they stay on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sash.engine.processors import use_processors
from sash.ops import native
from sash.ops.registry import resolve_ops
from sash.spec.config import EngineConfig
from sash.spec.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 100_000}, "threads=100000 is more than there are processors; use at most "),
        ({"cpu_affinity": "0,99999"}, "cpu_affinity=0,99999: there is no processor 99999 for this process; use some"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, object], message: str) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=message):
        use_processors(EngineConfig(**options), resolve_ops())  # type: ignore[arg-type]
    assert torch.get_num_threads() == before


def test_other_kernels_are_not_pinned() -> None:
    first = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    with pytest.raises(ConfigError, match="don't run here; leave it out"):
        use_processors(EngineConfig(cpu_affinity=str(first)), resolve_ops(kernels="torch"))


CODE = """
import os, torch, sys
from sash.engine.processors import use_processors
from sash.ops import native_linear, packed
from sash.ops.registry import resolve_ops
from sash.spec.config import EngineConfig
before, everywhere = torch.get_num_threads(), os.sched_getaffinity(0)
use_processors(EngineConfig(), resolve_ops())
assert torch.get_num_threads() == before
use_processors(EngineConfig(threads=1), resolve_ops())
assert torch.get_num_threads() == 1
first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
use_processors(EngineConfig(cpu_affinity=str(last)), resolve_ops())
assert torch.get_num_threads() == 1
native_linear.linear(torch.randn(2, 8), packed.pack(torch.randn(70, 8), "int8"), None)
assert os.sched_getaffinity(0) == {last}, os.sched_getaffinity(0)
use_processors(EngineConfig(cpu_affinity=str(first)), resolve_ops())
native_linear.linear(torch.randn(2, 8), packed.pack(torch.randn(70, 8), "int8"), None)
assert os.sched_getaffinity(0) == {first}, os.sched_getaffinity(0)
use_processors(EngineConfig(), resolve_ops())
assert torch.get_num_threads() == before
native_linear.linear(torch.randn(2, 8), packed.pack(torch.randn(70, 8), "int8"), None)
assert os.sched_getaffinity(0) == everywhere, os.sched_getaffinity(0)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system can't pin threads")
def test_threads_and_processors_are_as_asked_for() -> None:
    """In a process of its own, whose main thread stays pinned."""
    if native.load()[0] is None:
        pytest.skip("the C++ kernels are not built")
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120, env=os.environ | {"SASH_KERNELS": "native"})
