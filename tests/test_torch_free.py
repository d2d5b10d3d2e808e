"""Bookkeeping and the command line start without torch: each part is imported in a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import sash.kv
import sash.planner
import sash.scheduler
import sash.server
import sash.spec


def modules(package: object, prefix: str) -> list[str]:
    return sorted(item.name for item in pkgutil.walk_packages(package.__path__, prefix + "."))  # type: ignore[attr-defined]


SPEC = modules(sash.spec, "sash.spec")
SCHEDULER = modules(sash.scheduler, "sash.scheduler")
LEDGER = [name for name in modules(sash.kv, "sash.kv") if name.startswith("sash.kv.ledger")]
PARTS = {
    "package": ["sash"],
    "spec": SPEC,
    "ledger": LEDGER,
    "scheduler": SCHEDULER,
    "planner": modules(sash.planner, "sash.planner"),
    "drafts": ["sash.engine.drafts"],
    "server": modules(sash.server, "sash.server"),
    "grammars": ["sash.engine.grammar_process"],
    "command line": ["sash.cli.main", "sash.cli.generate", "sash.cli.chat", "sash.cli.inspect", "sash.cli.plan"],
}
CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit(", ".join(heavy for heavy in ("torch", "transformers", "safetensors", "numpy") if heavy in sys.modules) or 0)
"""


@pytest.mark.parametrize("part", PARTS)
def test_part_loads_no_torch(part: str) -> None:
    assert PARTS[part], f"no module found for {part}"
    result = subprocess.run([sys.executable, "-c", CHECK, *PARTS[part]], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{part} loads {result.stderr.strip()}"


def test_the_check_can_fail() -> None:
    result = subprocess.run([sys.executable, "-c", CHECK, "numpy"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip() == "numpy"
