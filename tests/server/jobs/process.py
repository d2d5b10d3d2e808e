"""A server around a scripted engine, in a process that can be killed: ``process.py JOBS_DIR LOG``. Its port comes on
standard output; every prompt that it begins is a line of the log."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvicorn
from tests.server.apps import fake_engine

from sash.engine.messages import AddRequest
from sash.server.app import create_app
from sash.server.settings import ServerSettings


def main(folder: Path, log: Path) -> None:
    def script(message: AddRequest, _: int) -> list[int | str]:
        with open(log, "ab") as file:
            file.write(bytes(message.prompt_token_ids) + b"\n")
        return [*b"answer", "stop"]

    app = create_app(fake_engine(script=script, delay_s=0.004), ServerSettings("tiny", jobs_dir=folder))
    sock = socket.create_server(("127.0.0.1", 0))
    print(sock.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([sock])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
