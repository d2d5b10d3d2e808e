"""create_app: routes, errors and middleware around an engine; no socket, no process, no global state."""

from __future__ import annotations

from fastapi import FastAPI

from sash import __version__
from sash.server.engine import ServingEngine
from sash.server.settings import ServerSettings
from sash.server.state import ServerState


def create_app(engine: ServingEngine, settings: ServerSettings) -> FastAPI:
    """The server as an ASGI app."""
    app = FastAPI(title="sash", version=__version__, root_path=settings.root_path)
    app.state.server = ServerState(engine, settings)
    return app
