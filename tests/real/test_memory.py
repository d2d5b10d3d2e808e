"""Memory of one long request on the real model: window pages stay flat, the process grows by the full layers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real.grow import Growth, grow
from tests.real_models import real_model

pytestmark = [pytest.mark.real, pytest.mark.e2e, pytest.mark.timeout(1800)]

# ceil((W - 1) / page) + 1 pages of 16 tokens for W = 512.
RING = 33


def test_from_1000_to_32000_tokens_windows_stay_flat_and_the_process_hardly_grows() -> None:
    real_model("gemma3-270m")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.real.grow", "32000"], cwd=root, capture_output=True, text=True, check=True
    )
    steps = [Growth(**step) for step in json.loads(run.stdout.splitlines()[-1])]
    early = next(step for step in steps if step.tokens >= 1000)
    last = steps[-1]
    assert last.tokens >= 32_000
    later = [step for step in steps if step.tokens >= early.tokens]
    # A window of 511 rows and the next one lies on 32 or 33 pages, 15 layers of 1 KiB a row.
    assert {step.window_bytes for step in later} <= {pages * 16 * 15 * 1024 for pages in (RING - 1, RING)}
    grown = last.resident_bytes - early.resident_bytes
    print(f"{early.resident_bytes / 1e6:.0f} MB at {early.tokens} tokens, {grown / 1e6:.0f} MB more at {last.tokens}")
    assert grown <= 150e6


@pytest.mark.parametrize("chunk", [64, 512, 4096])
def test_private_window_pages_at_every_step_of_a_long_prompt(chunk: int) -> None:
    real_model("gemma3-270m")
    steps = grow(20_000, decode_steps=0, chunk=chunk)
    assert len(steps) == -(-20_000 // chunk)
    assert RING - 1 <= max(step.private_window_pages for step in steps) <= RING
