"""The server's log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from sash.server.logs import configure_logs
from sash.spec.log import logger


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield root
    root.handlers, root.level = handlers, level


def test_long_texts_lose_their_middle(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json")
    try:
        raise ValueError("begin" + "x" * 10**6 + "end")
    except ValueError:
        logger().exception("request_failed", path="/v1/completions")
        root.error("uvicorn", exc_info=True)
    for line in capsys.readouterr().err.splitlines():
        text = json.loads(line)["exception"]
        assert len(text) < 20_000 and "beginxxx" in text and text.endswith("xxxend")
        assert " characters … " in text
