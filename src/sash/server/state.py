"""ServerState: what all routes share; one per app, nothing global."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from sash.server.engine import ServingEngine
from sash.server.settings import ServerSettings


@dataclass(slots=True)
class ServerState:
    """The engine, the settings, and whether new requests are taken."""

    engine: ServingEngine
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False


def state_of(request: Request) -> ServerState:
    """The state of the app that a request reached; for ``Depends``."""
    state: ServerState = request.app.state.server
    return state
