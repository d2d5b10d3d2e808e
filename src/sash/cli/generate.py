"""``sash generate``: one prompt, one or more answers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from sash.cli.engine import Run, open_engine, report_endings, run_request
from sash.cli.options import EngineOptions, SamplingOptions, with_options
from sash.cli.progress import Progress
from sash.cli.prompt import read_prompt
from sash.cli.report import plain, pool_rows, print_stats
from sash.cli.streams import print_json

MODEL_HELP = "gemma3-270m, smollm2-135m, a Hugging Face folder, a .gguf file, or a hub id."


@with_options
def generate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    sampling: SamplingOptions,
    engine: EngineOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, --file or standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a UTF-8 file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print rates and pool bytes when done.")] = False,
) -> None:
    """Continue a prompt; the text is streamed to standard output."""
    params = sampling.params(engine.seed)
    text = read_prompt(prompt, file)
    progress = Progress()
    started = time.perf_counter()
    try:
        llm = open_engine(ctx, model, engine, progress)
        load_s = time.perf_counter() - started
        streaming = not as_json and params.n == 1

        def show(piece: str) -> None:
            progress.close()
            sys.stdout.write(piece)
            sys.stdout.flush()

        run = run_request(llm, text, params, show if streaming else None)
    finally:
        progress.close()
    timings = run.timings(load_s)
    if as_json:
        print_json(_document(run, timings, pool_rows(llm.stats())))
    elif streaming:
        print()
    else:
        for index, answer in sorted(run.answers.items()):
            print(f"--- answer {index + 1} of {params.n}\n{answer.text}")
    if stats:
        sys.stdout.flush()
        print_stats(llm.stats(), timings)
    report_endings(run)


def _document(run: Run, timings: dict[str, float | int | None], rows: list[dict[str, object]]) -> dict[str, object]:
    outputs = []
    for index, answer in sorted(run.answers.items()):
        item: dict[str, object] = {
            "index": index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
        }
        if answer.error:
            item["error"] = answer.error
        if answer.logprobs is not None:
            item["logprobs"] = plain(answer.logprobs)
        outputs.append(item)
    first = outputs[0] if outputs else {"text": "", "token_ids": [], "finish_reason": None}
    document = {key: first[key] for key in ("text", "token_ids", "finish_reason")}
    document |= {"prompt_token_ids": run.prompt_token_ids, "outputs": outputs, "timings": timings, "pools": rows}
    if run.prompt_logprobs is not None:
        document["prompt_logprobs"] = plain(run.prompt_logprobs)
    return document
