"""``sash chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sash.cli.engine import open_engine, report_endings, run_request
from sash.cli.options import EngineOptions, SamplingOptions, with_options
from sash.cli.progress import Progress
from sash.spec.errors import RequestError

if TYPE_CHECKING:
    from sash.text.base import Tokenizer

PROMPT = "> "


@with_options
def chat(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="As for generate.")],
    sampling: SamplingOptions,
    engine: EngineOptions,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja template, for a model that brings none.")] = None,
) -> None:
    """Talk with a model. An empty line or end of input ends it; Ctrl-C cuts an answer short.

    A base model that brings no template, and gets none, is shown lines of "role: text".
    """
    # Here, not above: tokenizers take longer to load than all of inspect.
    from sash.text.chat import PLAIN_TEMPLATE, encode_chat, end_turns

    params = sampling.params(engine.seed)
    if params.n != 1:
        raise RequestError(f"--n must be 1 in a chat, got {params.n}")
    own = _template(chat_template)
    progress = Progress()
    messages = _system(system)

    def template_of(tokenizer: Tokenizer) -> str:
        return own if own is not None else tokenizer.chat_template or PLAIN_TEMPLATE

    def rehearse(tokenizer: Tokenizer) -> None:
        encode_chat(tokenizer, [*messages, {"role": "user", "content": "?"}], template=template_of(tokenizer))

    try:
        llm = open_engine(ctx, model, engine, progress, rehearse)
        template = template_of(llm.tokenizer)
        ends = end_turns(params, template)
        while question := _ask():
            messages.append({"role": "user", "content": question})
            said: list[str] = []

            def show(piece: str, said: list[str] = said) -> None:
                progress.close()
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()

            try:
                run = run_request(llm, encode_chat(llm.tokenizer, messages, template=template), ends, show)
            except KeyboardInterrupt:
                if not said:
                    raise
                print()
            else:
                print()
                report_endings(run)
            messages.append({"role": "assistant", "content": "".join(said)})
    finally:
        progress.close()


def _system(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--chat-template {file} can't be read ({error}): name a Jinja file in UTF-8") from error


def _ask() -> str:
    """The next question; empty at the end of the conversation."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise RequestError("standard input is not valid UTF-8: convert it, for example with iconv") from error
