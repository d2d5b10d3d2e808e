"""``sash doctor``: checks of a model, a config.json, a running server or a log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sash.cli.options import EngineOptions, with_options
from sash.cli.streams import log_to_stderr, print_json
from sash.spec.errors import ConfigError

if TYPE_CHECKING:
    from sash.doctor.finding import Finding
    from sash.spec.config import EngineConfig
    from sash.spec.locate import ModelSource

Say = Callable[[str], None]


@with_options
def doctor(
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Argument(help="A model as for generate, or a bare config.json: checks without weights.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server: sash's, or any that is OpenAI-compatible.", metavar="URL")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="A log that sash serve wrote.", metavar="FILE")] = None,
    symptom: Annotated[
        str | None,
        typer.Option(
            help="Only the checks for: repeats, memory, kv-grows, slow, edge-facts, batch, refused or myths; in order."
        ),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Let transformers run MODEL, and look from outside.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server.", envvar="OPENAI_API_KEY", show_envvar=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look for faults and waste: evidence, cause, and the command that mends it. Exits with 0 where nothing is wrong,
    1 where something is, 2 where it could not look."""
    from sash.doctor.finding import exit_code
    from sash.doctor.render import as_document, as_text
    from sash.doctor.symptoms import order_of, ordered

    order = order_of(symptom)
    if sum(given is not None for given in (model, url, log)) != 1:
        raise ConfigError("give one of MODEL, --url http://127.0.0.1:8000 and --log FILE")
    if transformers and model is None:
        raise ConfigError("--transformers needs a MODEL that transformers can load")
    if engine.given() and (model is None or transformers):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in engine.given())
        raise ConfigError(f"{options}: options of an engine that sash starts; leave them out, or name a MODEL of sash")
    with _stages() as say:
        found = _findings(model, url, log, engine, say, transformers=transformers, api_key=api_key)
    findings = ordered(found, order)
    what = model or url or str(log)
    if as_json:
        print_json(as_document(findings, what))
    else:
        print(as_text(findings, what))
    raise typer.Exit(exit_code(findings))


def _findings(
    model: str | None,
    url: str | None,
    log: Path | None,
    engine: EngineOptions,
    say: Say,
    *,
    transformers: bool,
    api_key: str | None,
) -> list[Finding]:
    if log is not None:
        from sash.doctor.logs import examine_log

        return examine_log(log)
    if url is not None:
        from sash.doctor.client import Client
        from sash.doctor.server import examine_server

        return examine_server(Client(url, api_key), say)
    assert model is not None
    if transformers:
        from sash.doctor.transformers_model import examine_theirs, open_theirs

        say("loading the model with transformers")
        return examine_theirs(open_theirs(model))
    return _of_model(model, engine, say)


def _of_model(model: str, engine: EngineOptions, say: Say) -> list[Finding]:
    from sash.spec.config import EngineConfig
    from sash.spec.locate import locate

    options = EngineConfig(**engine.given())  # type: ignore[arg-type]
    source = locate(model, allow_config=True)
    if source.kind == "config":
        return _of_config(source, options)
    # What the engine tells as it starts is found by checks.
    log_to_stderr(logging.ERROR)
    from sash.doctor.engine import examine_model

    return examine_model(model, options, say)


def _of_config(source: ModelSource, options: EngineConfig) -> list[Finding]:
    from sash.doctor.settings import setting_findings
    from sash.spec.load import load_spec
    from sash.spec.machine import probe_cpu

    spec = load_spec(source)
    return setting_findings(spec, options.resolve(spec, probe_cpu()))


@contextmanager
def _stages() -> Iterator[Say]:
    """Tells on a terminal's standard error what happens now."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("looking") as status:
        yield lambda stage: status.update(stage)
