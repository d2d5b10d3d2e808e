"""``sash export-tokenizer``: the folder that clients ask for when they count tokens on their own side."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from sash.spec.errors import ConfigError
from sash.spec.load import load_spec
from sash.spec.locate import locate


def export_tokenizer(
    model: Annotated[str, typer.Argument(help="As for generate.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made when it isn't there.")],
    chat_template: Annotated[
        Path | None, typer.Option(help="A jinja file that replaces the model's own template.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a model's tokenizer as a folder for transformers' AutoTokenizer and the clients that use it.

    The ids are those of sash: compared before anything is written.
    """
    from sash.text.export import FILES, tokenizer_files

    source = locate(model)
    present = [name for name in FILES if os.path.lexists(folder / name)]
    if present and not force:
        raise ConfigError(f"{folder} has {', '.join(present)} already: name another folder, or replace with --force")
    if source.kind == "folder" and folder.resolve() == source.path.resolve():
        raise ConfigError(f"{folder} is the model's own folder: name another")
    template = None if chat_template is None else _read(chat_template)
    files = tokenizer_files(source, load_spec(source).max_position, template)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _write(folder / name, text)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}; name a folder of yours") from error
    print(f"{folder}: {', '.join(files)}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} can't be read as UTF-8 text ({error}); name a jinja file") from error


def _write(path: Path, text: str) -> None:
    """Whole or not at all; what a link of that name points at stays as it is."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
