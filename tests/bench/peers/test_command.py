"""``sash bench peers`` as a command: asked to end, it takes its workers along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# The command with scripted workers that hang while they load.
COMMAND = """
import sys
from sash.bench.peers import compare
from sash.bench.peers.process import Worker
from sash.cli.main import main

worker, pid_file, gguf = sys.argv[1:]

def launch(peer):
    made = Worker("sash", [sys.executable, worker, "hangs-load", pid_file + ".log"])
    open(pid_file, "w").write(str(made._process.pid))
    return made, "model"

run = compare.run
compare.run = lambda plan, root: run(plan, root, launch=launch)
compare.load_spec = compare.topics_ids = lambda *given: None
compare.load_tokenizer = lambda path: None
compare.locate = lambda model: type("Source", (), {"path": gguf})
sys.argv = ["sash", "bench", "peers", "--peers", "none", "--cases", "8"]
main()
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_it_ends_its_workers_when_it_is_asked_to_end(tmp_path: Path) -> None:
    fake, pid_file = Path(__file__).parent / "fake_worker.py", tmp_path / "pid"
    command = [sys.executable, "-c", COMMAND, str(fake), str(pid_file), str(tmp_path / "model.gguf")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid.log").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
