"""Run a test command and append one line about it to docs/records/tests.jsonl: ``record_run.py NAME -- COMMAND …``."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from sash.bench.record import append_record, circumstances

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "records" / "tests.jsonl"


def main(arguments: list[str]) -> int:
    """Stream the command's output, record its outcome, and return its exit code."""
    if len(arguments) < 3 or arguments[1] != "--":
        print("usage: record_run.py NAME -- COMMAND ...", file=sys.stderr)
        return 2
    name, command = arguments[0], arguments[2:]
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        last_summary = ""
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            last_summary = line if re.search(r"\d+ (passed|failed|error)", line) else last_summary
    entry = {
        "run": name,
        **circumstances(Path(__file__)),
        "seconds": round(time.monotonic() - started, 1),
        "exit_code": process.returncode,
        **{
            word: int(count)
            for count, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|errors?)", last_summary)
        },
    }
    append_record(entry, RECORD)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
