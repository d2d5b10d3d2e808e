"""The ``sash`` command. What a command needs loads with that command, torch inside those that need it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Annotated, Any

import typer
import typer.core

from sash import __version__
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


def _aliased(name: str) -> str:
    from sash.cli.options import ALIASES

    return ALIASES.get(name, name)


ALIASED = {"token_normalize_func": _aliased}
# Each command: the module with a function of its name, and what typer is told beside it.
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (
        "sash.cli.generate",
        {
            "context_settings": ALIASED,
            "epilog": 'Example: sash generate gemma3-270m "The capital of France is" --max-tokens 20 --temperature 0',
        },
    ),
    "chat": ("sash.cli.chat", {"context_settings": ALIASED}),
    "serve": ("sash.cli.serve", {"context_settings": ALIASED}),
    "inspect": ("sash.cli.inspect", {}),
    "plan": ("sash.cli.plan", {"epilog": "Example: sash plan gemma-3-27b --memory 80GB --context 32k"}),
    "doctor": ("sash.cli.doctor", {"context_settings": ALIASED}),
    "lab": ("sash.cli.lab", {}),
    "bench": ("sash.cli.bench", {}),
    "export-tokenizer": ("sash.cli.export", {}),
}
BENCH = ("offline", "peers", "ops", "render")


class LazyCommands(Mapping[str, Any]):
    """The commands by name. One is imported when it is asked for: ``sash plan`` waits for no other."""

    def __getitem__(self, name: str) -> Any:
        module, settings = COMMANDS[name]
        found = importlib.import_module(module)
        if name == "bench":
            return typer.main.get_command(_bench(found))
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(name, cls=SashCommand, **settings)(getattr(found, name.replace("-", "_")))
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class RootGroup(SashGroup):
    """``sash`` itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands()  # type: ignore[assignment]  # is read only


def _bench(module: ModuleType) -> typer.Typer:
    bench = typer.Typer(
        name="bench",
        cls=SashGroup,
        help="Measure sash beside its peers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in BENCH:
        bench.command(name, cls=SashCommand)(getattr(module, name))
    return bench


app = typer.Typer(
    cls=RootGroup,
    help="sliding-window LLM inference",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
