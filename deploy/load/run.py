"""Loads sash's server and writes report.md, its plots and record.json beside this file: python deploy/load/run.py

Needs sash with its extras serve and bench. What generates the load and what is compared with is installed into
environments in sash's cache folder, the first time.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from sash.bench.serving.measure import Bench, Plan
from sash.bench.serving.render import render
from sash.spec.errors import SashError
from sash.spec.locate import cache_dir

HERE = Path(__file__).resolve().parent
QUICK = {
    "concurrency": (2,),
    "requests_each": 2,
    "prompt": 64,
    "output": 16,
    "repeats": 1,
    "idle": 8,
    "locust_users": 2,
    "locust_rate": 1.0,
    "locust_s": 8.0,
    "longest": 200,
    "others_at": 2,
}


def main(
    model: Annotated[str, typer.Option(help="As for sash serve.")] = "gemma3-270m",
    quick: Annotated[bool, typer.Option("--quick", help="Everything once and short: does it work?")] = False,
    repeats: Annotated[int, typer.Option(help="Alternating runs of each comparison.", min=1)] = 3,
    others: Annotated[str, typer.Option(help="Servers to compare with between commas, or none.")] = "llama-server,vllm",
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = HERE,
    only_others: Annotated[
        bool, typer.Option("--only-others", help="Compare with the other servers again; keep the rest of the record.")
    ] = False,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Draw the record that is there once more.")
    ] = False,
) -> None:
    """Measure, then render."""
    # Asked to end, it ends its servers first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    record_file = out / "record.json"
    try:
        if not render_only:
            names = () if others == "none" else tuple(others.split(","))
            plan = Plan(model, others=names, **(QUICK if quick else {"repeats": repeats}))
            with tempfile.TemporaryDirectory() as folder:
                cache = cache_dir()
                bench = Bench(plan, Path(folder), cache / "clients", cache / "peers", HERE / "locustfile.py", print)
                if only_others:
                    record = bench.run_others(json.loads(record_file.read_text(encoding="utf-8")))
                else:
                    record = bench.run()
            out.mkdir(parents=True, exist_ok=True)
            record_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        files = render(json.loads(record_file.read_text(encoding="utf-8")), out)
    except SashError as error:
        print(f"load: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print("wrote " + ", ".join(file.name for file in files))


if __name__ == "__main__":
    typer.run(main)
