"""The ``sash`` command. Torch loads inside the commands that need it, never here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
import typer.core

from sash import __version__
from sash.cli.bench import offline, ops, peers, render
from sash.cli.chat import chat
from sash.cli.doctor import doctor
from sash.cli.export import export_tokenizer
from sash.cli.generate import generate
from sash.cli.inspect import inspect
from sash.cli.options import ALIASES
from sash.cli.serve import serve
from sash.cli.streams import standard_streams
from sash.spec.errors import SashError


class SashCommand(typer.core.TyperCommand):
    """Its help shows what an option takes each time: a switch nothing."""

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Options and arguments, ``--help`` among them."""
        return _typed(super().get_params(ctx))


class SashGroup(typer.core.TyperGroup):
    """Turns what sash refuses into a message on standard error and exit code 2, without a traceback."""

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """As for a command."""
        return _typed(super().get_params(ctx))

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except SashError as error:
            print(f"sash: {error}", file=sys.stderr)
            raise typer.Exit(2) from None


def _typed(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_bool_flag", False):
            param.metavar = ""
        elif getattr(param, "multiple", False):
            param.metavar = "<str>"  # one at a time; the list is sash's own
    return params


app = typer.Typer(
    cls=SashGroup,
    help="sliding-window LLM inference",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(cls=SashGroup, help="Measure sash beside its peers.", no_args_is_help=True)

ALIASED = {"token_normalize_func": lambda name: ALIASES.get(name, name)}
EXAMPLE = 'Example: sash generate gemma3-270m "The capital of France is" --max-tokens 20 --temperature 0'
app.command("generate", cls=SashCommand, context_settings=ALIASED, epilog=EXAMPLE)(generate)
app.command("chat", cls=SashCommand, context_settings=ALIASED)(chat)
app.command("serve", cls=SashCommand, context_settings=ALIASED)(serve)
app.command("inspect", cls=SashCommand)(inspect)
app.command("doctor", cls=SashCommand, context_settings=ALIASED)(doctor)
app.command("export-tokenizer", cls=SashCommand)(export_tokenizer)
app.add_typer(bench_app, name="bench")
for command in (offline, peers, ops, render):
    bench_app.command(command.__name__, cls=SashCommand)(command)


@bench_app.callback()
def bench() -> None:
    """Measure sash beside its peers."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sash {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """sliding-window LLM inference"""


def main() -> None:
    """Entry point of the console script; exits with 0, 2 (refused), 130 (interrupted) or 1 (a defect)."""
    with standard_streams():
        app(prog_name="sash")
