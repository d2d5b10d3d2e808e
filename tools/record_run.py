"""Run a test command and append one line about it to docs/records/tests.jsonl: ``record_run.py NAME -- COMMAND …``."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

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
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "changed_files": len(git("status", "--porcelain").splitlines()),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "seconds": round(time.monotonic() - started, 1),
        "exit_code": process.returncode,
        **{
            word: int(count)
            for count, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|errors?)", last_summary)
        },
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    return process.returncode


def git(*arguments: str) -> str:
    """Output of a git command; empty outside a repository."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def cpu_name() -> str:
    """The processor's name where Linux tells it."""
    try:
        match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match[1] if match else platform.processor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
