from __future__ import annotations

import pytest
from tests.cli.scripted import HELLO, Outcome, Run, ScriptedEngine
from typer.testing import CliRunner

from sash.cli.main import app


@pytest.fixture
def run() -> Run:
    """Run ``sash`` with arguments, an engine and standard input."""

    def call(*arguments: str, engine: ScriptedEngine | None = None, stdin: str | bytes | None = None) -> Outcome:
        result = CliRunner().invoke(app, list(arguments), input=stdin, obj=engine)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def hello() -> ScriptedEngine:
    """Says "Hello!" in three steps."""
    return ScriptedEngine(HELLO)
