"""What the machine offers, read without torch: free memory (container limits included), bf16."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that defaults depend on. ``available_bytes`` is the device's free memory at start."""

    available_bytes: int
    has_bf16: bool
    device: str = "cpu"


def probe_cpu() -> Machine:
    """The CPU as it is now: the smaller of free memory and what the container limits leave."""
    limits = [_mem_available(), _cgroup_left()]
    return Machine(min(x for x in limits if x is not None), _cpu_has_bf16())


def _mem_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: the standard library tells the total, not what is free. Half is left to the system and other
    # programs, as pools that don't fit into memory would swap.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_left() -> int | None:
    """Limit minus use of the control group (v2, then v1); page cache counts as free. None: no limit."""
    for limit, used, stat in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        try:
            top = Path(limit).read_text().strip()
            if top == "max" or int(top) >= 1 << 60:
                return None
            files = sum(
                int(line.split()[1])
                for line in Path(stat).read_text().splitlines()
                if line.startswith(("inactive_file ", "total_inactive_file "))
            )
            return max(int(top) - int(Path(used).read_text()) + files, 0)
        except (OSError, ValueError):
            continue
    return None


def _cpu_has_bf16() -> bool:
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    # x86 has two extensions for it; Arm calls its own bf16.
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
