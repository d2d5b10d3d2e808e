"""Metrics for Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from sash.server.errors import error_responses
from sash.server.state import ServerState, state_of
from sash.server.telemetry.exposition import CONTENT_TYPE, Exposition, Scrape

router = APIRouter(tags=["operation"])
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


@router.get("/metrics", response_class=Response, responses={200: {"content": _TEXT}, **error_responses(401)})
async def metrics(request: Request, state: Annotated[ServerState, Depends(state_of)]) -> Response:
    """Everything in Prometheus' text format; docs/metrics.md says what each name means."""
    sample = await state.reports.get()
    exposition: Exposition = request.app.state.exposition
    scrape = Scrape(sample, state.use.read(state.engine.pid), await state.job_counts())
    return Response(exposition.render(scrape), headers={"content-type": CONTENT_TYPE})
