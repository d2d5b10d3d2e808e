"""Statistics for people and tools, and the same as a stream for whoever watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from sash.server.errors import error_responses
from sash.server.serving import stream_of
from sash.server.state import ServerState, state_of
from sash.server.telemetry.stats import make_stats, stats_schema

router = APIRouter(tags=["operation"])
_JSON = {"application/json": {"schema": stats_schema()}}
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


@router.get("/stats", response_class=Response, responses={200: {"content": _JSON}, **error_responses(401)})
async def stats(state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """Pools, queues, requests, latency of the last five minutes, throughput, processes, versions."""
    return Response(msgspec.json.encode(await make_stats(state)), media_type="application/json")


@router.get("/stats/stream", response_class=Response, responses={200: {"content": _EVENTS}, **error_responses(401)})
async def stream(
    state: Annotated[ServerState, Depends(state_of)],
    interval_ms: Annotated[int, Query(ge=100, le=60_000, description="between two events")] = 250,
) -> Response:
    """The same again and again as server-sent events, with page maps and the throughput of each second. All who watch
    share what the engine tells. Ends when the server has drained."""

    async def events() -> AsyncGenerator[bytes, None]:
        while not (state.draining and not state.engine.num_open):
            now = await make_stats(state, live=True, max_age_s=interval_ms / 2000)
            yield b"data: " + msgspec.json.encode(now) + b"\n\n"
            await asyncio.sleep(interval_ms / 1000)

    return stream_of(state, events, {})
