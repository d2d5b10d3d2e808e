"""What a record says besides its figures: where, when and of which commit they are; one JSON line each."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sash.spec.errors import ConfigError


def circumstances(file: Path) -> dict[str, Any]:
    """Date (UTC), commit and changed files of the checkout that ``file`` belongs to, Python, processor and cores.

    Outside a checkout the commit is "unknown" and no file counts as changed.
    """
    # An installed copy may lie in a folder of somebody else's checkout, which doesn't list it.
    ours = bool(_git(file, "ls-files", file.name))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": (ours and _git(file, "rev-parse", "--short=12", "HEAD")) or "unknown",
        "changed_files": len(_git(file, "status", "--porcelain").splitlines()) if ours else 0,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }


def cpu_name() -> str:
    """The processor's name where Linux tells it."""
    try:
        match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match[1] if match else platform.processor() or "unknown"


def check_record(path: Path, option: str = "--record") -> None:
    """Find out before the work whether a record can be kept in a file that ``option`` named.

    Raises:
        ConfigError: it can't.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: {path} can't be written ({error.strerror}); name another") from error


def append_record(record: dict[str, Any], path: Path) -> None:
    """One JSON line at the end of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _git(file: Path, *arguments: str) -> str:
    """Output of a git command beside ``file``; empty outside a checkout, or without git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
