"""The models that requests may name."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from sash.server.errors import error_responses
from sash.server.state import ServerState, state_of

router = APIRouter(tags=["models"])


class ModelCard(BaseModel):
    """A model. ``root`` is the first of its names; ``max_model_len`` is None until it has loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["sash"] = "sash"
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def _card(state: ServerState, name: str) -> ModelCard:
    info = state.engine.info
    return ModelCard(
        id=name,
        created=state.created,
        root=state.settings.model_name,
        max_model_len=None if info is None else info.max_model_len,
    )


@router.get("/v1/models", responses=error_responses(401))
async def list_models(state: Annotated[ServerState, Depends(state_of)]) -> ModelList:
    """The model that is served, once under each of its names."""
    return ModelList(data=[_card(state, name) for name in state.settings.names])


@router.get("/v1/models/{name:path}", responses=error_responses(401, 404))
async def get_model(name: str, state: Annotated[ServerState, Depends(state_of)]) -> ModelCard:
    """One model; names may have slashes."""
    return _card(state, state.check_model(name))
