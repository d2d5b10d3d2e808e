from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import structlog

from sash.cli.engine import Run, build
from sash.cli.progress import Progress


def test_the_real_builder_logs_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: dict[str, Any] = {}

    def llm(model: str, **options: object) -> object:
        made.update(options, model=model)
        structlog.get_logger().info("Use sliding window memory pool.", full_layer_tokens=100, swa_layer_tokens=20)
        structlog.get_logger().debug("not shown")
        return object()

    home = types.ModuleType("sash.engine.llm")
    home.LLM = llm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    progress = Progress()
    try:
        build("tiny", {"page_size": 16}, progress)
    finally:
        structlog.reset_defaults()
    assert made == {"model": "tiny", "page_size": 16, "progress": progress}
    captured = capsys.readouterr()
    assert captured.err == "Use sliding window memory pool. full_layer_tokens=100 swa_layer_tokens=20\n"
    assert captured.out == ""


def test_a_run_without_tokens_has_no_rates() -> None:
    timings = Run(prompt_token_ids=[1, 2], total_s=1.0).timings(0.5)
    assert (timings["decode_tokens_per_s"], timings["prefill_tokens_per_s"]) == (None, None)
