"""Whether the server runs, whether it takes work, and what it is."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from sash import __version__
from sash.server.errors import ApiError, error_responses
from sash.server.state import ServerState, state_of

router = APIRouter(tags=["operation"])


class Version(BaseModel):
    """The server's version."""

    version: str


class Load(BaseModel):
    """Answers that run or wait."""

    server_load: int


@router.get("/health", response_class=Response, responses=error_responses(503))
async def health(state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """200 with no body, also while the model loads; 503 when the engine has died."""
    if not state.engine.alive and not state.loading:
        raise ApiError(503, "the engine has failed", code="engine_dead")
    return Response()


@router.get("/ready", response_class=Response, responses=error_responses(503))
async def ready(state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """200 with no body when requests are taken; 503 while the model loads and while the server shuts down."""
    if state.draining:
        raise ApiError(503, "the server is shutting down", code="draining")
    state.check_serving()
    return Response()


@router.get("/version", responses=error_responses())
async def version() -> Version:
    """The version of sash."""
    return Version(version=__version__)


@router.get("/load", responses=error_responses())
async def load(state: Annotated[ServerState, Depends(state_of)]) -> Load:
    """How many answers run or wait."""
    return Load(server_load=state.engine.num_open)
