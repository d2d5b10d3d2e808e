"""Log lines of a library stay off standard output."""

from __future__ import annotations

import pytest
import structlog

from sash.spec.log import logger


def test_lines_go_to_standard_error_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    logger().info("decided", reason="because")
    out, err = capsys.readouterr()
    assert out == ""
    assert "decided" in err and "because" in err


def test_a_program_keeps_its_own_configuration() -> None:
    seen: list[dict[str, object]] = []

    def take(_logger: object, _method: str, event: dict[str, object]) -> dict[str, object]:
        seen.append(event)
        raise structlog.DropEvent

    structlog.configure(processors=[take])
    try:
        logger().info("decided", reason="because")
    finally:
        structlog.reset_defaults()
    assert seen == [{"event": "decided", "reason": "because"}]
