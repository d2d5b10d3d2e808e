"""ServerState: what all routes share; one per app, nothing global."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from sash.server.engine import ServingEngine
from sash.server.errors import DRAINING, ApiError, draining_error
from sash.server.responses import ResponseStore
from sash.server.settings import ServerSettings
from sash.server.telemetry.metered import MeteredEngine
from sash.server.telemetry.metrics import Metrics
from sash.server.telemetry.reports import Reports, Use

if TYPE_CHECKING:
    from sash.server.jobs.service import Jobs


@dataclass(slots=True)
class Traffic:
    """Bytes of bodies, and answers by their status, since the start."""

    bytes_in: int = 0
    bytes_out: int = 0
    statuses: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class ServerState:
    """The engine, the settings, and whether new requests are taken. ``chat_template`` is the text of the settings'
    file, None where the model's own is used; ``default_sampling`` is for requests that give no values. ``engine``
    becomes one whose requests are counted in ``metrics``. ``jobs`` is None while no store is open."""

    engine: ServingEngine
    settings: ServerSettings
    chat_template: str | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    metrics: Metrics = field(default_factory=Metrics)
    reports: Reports = field(init=False)
    use: Use = field(init=False)
    jobs: Jobs | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)

    async def job_counts(self) -> dict[str, int] | None:
        """Jobs in the store by their state; None where there is no store, or it can't be read."""
        return None if self.jobs is None else await self.jobs.counts()

    def __post_init__(self) -> None:
        self.engine = MeteredEngine(self.engine, self.metrics)
        self.reports = Reports(self.engine, self.metrics)
        self.use = Use(self.metrics.clock)

    @property
    def loading(self) -> bool:
        """Whether the engine has never been ready yet."""
        return self.engine.info is None

    def check_serving(self) -> None:
        """Raises ApiError 503 while the engine loads, is started again after a failure, or has ended for good."""
        if self.engine.alive:
            return
        if self.draining:
            raise draining_error(DRAINING)
        told = "the model is still loading" if self.loading else "the engine has failed and is being started again"
        raise ApiError(503, f"{told}; try again in a moment", code="not_ready", headers={"Retry-After": "5"})

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that isn't served here."""
        names = self.settings.names
        if name is None or name in names:
            return name or names[0]
        served = ", ".join(names)
        raise ApiError(
            404, f"the model {name[:200]!r} does not exist; here is {served}", param="model", code="model_not_found"
        )


async def state_of(request: Request) -> ServerState:
    """The state of the app that a request reached; for ``Depends`` (a plain function would run in a thread)."""
    state: ServerState = request.app.state.server
    return state
