"""Virtual environments of the peers and models in the forms they read: made once, whole or not at all."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sash.bench.peers.catalogue import PEERS, Peer, file_name, pins_text
from sash.bench.peers.process import PeerError
from sash.spec.locate import ModelSource

SCRIPTS = Path(__file__).parent / "workers"
_READY = ".ready"
# Some peers are compiled on installation.
_INSTALL_S = 3600.0
_CONVERT_S = 1800.0
# Characters of a line that a failed command's message repeats: pip lists all versions of a package.
_SHOWN = 160

Say = Callable[[str], object]


class Workshop:
    """A folder with the peers' environments and converted models, filled on demand.

    Args:
        root: where; made when it isn't there.
        say: told what takes long, before it starts.
    """

    def __init__(self, root: Path, say: Say = print) -> None:
        self.root = root
        self._say = say

    def place(self, peer: Peer) -> Path:
        """The folder of a peer's environment."""
        return self.root / file_name(peer.name)

    def python(self, peer: Peer) -> Path:
        """The interpreter of a peer's environment, made if it isn't there or was made for other versions.

        Raises:
            PeerError: it can't be made; the next call starts afresh.
        """
        return make_environment(self.place(peer), peer.name, peer.requirements, peer.removed, self._say)

    def model(self, peer: Peer, source: ModelSource) -> Path:
        """The model in the form that a peer reads, converted if that hasn't been done.

        Raises:
            PeerError: there is no such form, or the conversion failed.
        """
        if peer.form == "gguf":
            if source.kind != "gguf":
                raise PeerError(f"{peer.name} reads GGUF files, and {source.path} is a folder")
            return source.path
        folder = source.path
        if source.kind == "gguf":
            folder = self._converted(source, "bfloat16", PEERS["transformers"], "make_folder.py", source.path)
        if peer.form == "openvino":
            return self._converted(source, "openvino-int8", peer, "make_openvino.py", folder)
        return folder

    def _converted(self, source: ModelSource, form: str, peer: Peer, script: str, path: Path) -> Path:
        """What ``script`` makes of ``path`` in a peer's environment."""
        stat = source.path.stat()
        key = hashlib.sha256(f"{source.path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
        folder = self.root / "models" / f"{file_name(source.name)}-{key}" / form
        if not folder.is_dir():
            python = self.python(peer)
            self._say(f"writing {source.name} as {form} to {folder}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            run([str(python), str(SCRIPTS / script), str(path), str(folder)], f"no {form} model", _CONVERT_S)
        return folder


def make_environment(
    place: Path, name: str, requirements: Sequence[str], removed: Sequence[str] = (), say: Say = print
) -> Path:
    """The interpreter of a virtual environment with pinned requirements, made if it isn't there or was made for others.

    ``removed`` are packages that these bring along and that aren't wanted; ``name`` leads errors.

    Raises:
        PeerError: it can't be made; the next call starts afresh.
    """
    python, ready, pins = place / "bin" / "python", place / _READY, pins_text(requirements, removed)
    if ready.is_file() and ready.read_text(encoding="utf-8") == pins:
        return python
    say(f"installing {', '.join(requirements)} into {place} (minutes, the first time)")
    # Gone first: what is interrupted from here on doesn't count as made.
    ready.unlink(missing_ok=True)
    run([sys.executable, "-m", "venv", "--clear", str(place)], f"{name}: no environment", _INSTALL_S)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run([*pip, "install", "--quiet", *requirements], f"{name}: can't be installed", _INSTALL_S)
    if removed:
        run([*pip, "uninstall", "--quiet", "--yes", *removed], f"{name}: uninstalling", _INSTALL_S)
    ready.write_text(pins, encoding="utf-8")
    return python


def run(command: Sequence[str], failed: str, timeout_s: float) -> None:
    """Run a command that says nothing unless it fails.

    Raises:
        PeerError: it failed or took too long; the message starts with ``failed``.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{failed}: {command[0]} took longer than {timeout_s:g} s") from error
    except OSError as error:
        raise PeerError(f"{failed}: {command[0]} can't start ({error.strerror})") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        told = [line[:_SHOWN] for line in lines if line and not line.startswith("WARNING")]
        raise PeerError(f"{failed}: {' | '.join(told[-3:]) or f'exit code {done.returncode}'}")
