from __future__ import annotations

import os
import re

import pytest
import structlog
from hypothesis import HealthCheck, settings

# Two busy cores make single examples slow at random, so no deadline; the seed is fixed so that a red run stays red.
settings.register_profile("quick", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("all", settings.get_profile("quick"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("SASH_TEST_PROFILE", "quick"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many pairs of values the passed rows of the equivalence matrix cover."""
    names = [report.nodeid for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    rows = [int(found[1]) for name in names if (found := re.search(r"test_matrix\.py::test_pairs\[(\d+)\]", name))]
    if rows:
        from tests.equivalence.rows import coverage

        terminalreporter.section("equivalence matrix")
        for line in coverage(rows)[0]:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _log_as_a_library() -> None:
    """A command or server that ran in this process before has configured the log for itself."""
    structlog.reset_defaults()
