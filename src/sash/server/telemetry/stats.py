"""Stats: the server at one moment for people and their tools; the page's live view is made of the same."""

from __future__ import annotations

import platform
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import msgspec

from sash import __version__
from sash.engine.report import EngineReport
from sash.server.state import ServerState
from sash.server.telemetry.histograms import Recent
from sash.server.telemetry.metrics import HISTORY_S
from sash.server.telemetry.pagemap import PageMap, fold
from sash.server.telemetry.reports import Machine, Sample

_FRACTIONS = (0.5, 0.95, 0.99)
_PACKAGES = ("torch", "fastapi", "uvicorn", "msgspec")
State = Literal["loading", "ready", "draining", "dead"]


class Model(msgspec.Struct, frozen=True):
    """What is served; the fields after ``names`` are None until it has loaded."""

    names: list[str]
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str | None = None
    quantization: str | None = None


class Limits(msgspec.Struct, frozen=True):
    """What the server allows; ``needs_key``: requests must bring an API key."""

    needs_key: bool
    max_waiting: int
    max_prompts: int
    max_body_bytes: int
    request_timeout_s: float


class Percentiles(msgspec.Struct, frozen=True):
    """Of the last five minutes, in seconds; None when ``count`` is 0."""

    count: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Latency(msgspec.Struct, frozen=True):
    """How long things took: to the first token, between deliveries of tokens, per token of an answer, to the end, and
    in the queue."""

    first_token_s: Percentiles
    inter_token_s: Percentiles
    per_token_s: Percentiles
    whole_s: Percentiles
    queue_s: Percentiles


class Throughput(msgspec.Struct, frozen=True):
    """Tokens a second over the last ten seconds and the last minute, and, where asked for, in each second of the last
    two minutes, oldest first. Prompts are counted as they are computed, answers as they are delivered."""

    prompt_10s: float
    prompt_60s: float
    generated_10s: float
    generated_60s: float
    prompt_by_second: list[int] | None = None
    generated_by_second: list[int] | None = None


class Requests(msgspec.Struct, frozen=True):
    """Prompts under way; answers since the start by how they ended; and requests that were turned away, by reason."""

    open: int
    finished: dict[str, int]
    rejected: dict[str, int]


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of bodies, and answers by their status, since the start."""

    received_bytes: int
    sent_bytes: int
    statuses: dict[int, int]


class Stats(msgspec.Struct, frozen=True):
    """Everything.

    ``engine`` is the core's own report, ``engine_age_s`` old; both None while it loads or is dead. Its pools' maps come
    apart, in ``page_maps`` by pool, where asked for. ``jobs`` counts by state where there is a store.
    """

    time_s: float
    uptime_s: float
    state: State
    model: Model
    limits: Limits
    requests: Requests
    latency: Latency
    throughput: Throughput
    traffic: Traffic
    machine: Machine
    engine_restarts: int
    engine_age_s: float | None
    engine: EngineReport | None
    jobs: dict[str, int] | None
    page_maps: dict[str, PageMap] | None
    versions: dict[str, str]


async def make_stats(state: ServerState, *, live: bool = False, max_age_s: float = 0.5) -> Stats:
    """The server now. ``live`` asks for page maps and the history of throughput; the engine's report may be
    ``max_age_s`` old."""
    sample = await state.reports.get(page_maps=live, max_age_s=max_age_s)
    metrics, traffic = state.metrics, state.traffic
    maps = None
    if live and sample is not None:
        maps = {p.name: fold(p.page_map, p.num_pages) for p in sample.report.pools if p.page_map is not None}
    return Stats(
        time_s=time.time(),
        uptime_s=metrics.clock() - metrics.started_s,
        state=_state(state),
        model=_model(state),
        limits=_limits(state),
        requests=Requests(metrics.open_requests, metrics.finished, metrics.rejected),
        latency=_latency(state),
        throughput=_throughput(state, by_second=live),
        traffic=Traffic(traffic.bytes_in, traffic.bytes_out, traffic.statuses),
        machine=state.use.read(state.engine.pid),
        engine_restarts=max(state.engine.starts - 1, 0),
        engine_age_s=None if sample is None else max(metrics.clock() - sample.taken_s, 0.0),
        engine=_without_maps(sample),
        jobs=await state.job_counts(),
        page_maps=maps,
        versions=_versions(),
    )


def _state(state: ServerState) -> State:
    if state.draining:
        return "draining"
    if state.engine.alive:
        return "ready"
    return "loading" if state.loading else "dead"


def _model(state: ServerState) -> Model:
    names, info = list(state.settings.names), state.engine.info
    if info is None:
        return Model(names)
    return Model(names, info.max_model_len, info.max_num_seqs, info.dtype, info.quantization)


def _limits(state: ServerState) -> Limits:
    settings = state.settings
    return Limits(
        needs_key=bool(settings.api_keys),
        max_waiting=settings.max_waiting,
        max_prompts=settings.max_prompts,
        max_body_bytes=settings.max_body_bytes,
        request_timeout_s=settings.request_timeout_s,
    )


def _latency(state: ServerState) -> Latency:
    m = state.metrics
    timings = (m.first_token, m.inter_token, m.per_token, m.whole, m.queue)
    return Latency(*(_percentiles(timing.recent) for timing in timings))


def _percentiles(recent: Recent) -> Percentiles:
    count, values = recent.percentiles(_FRACTIONS)
    return Percentiles(count, *(values or ()))


def _throughput(state: ServerState, *, by_second: bool) -> Throughput:
    prompts, generated = state.metrics.prompts.last(HISTORY_S), state.metrics.generated.last(HISTORY_S)
    uptime_s = state.metrics.clock() - state.metrics.started_s

    def mean(counts: list[float], seconds: int) -> float:
        return sum(counts[-seconds:]) / max(min(seconds, uptime_s), 1.0)

    return Throughput(
        prompt_10s=mean(prompts, 10),
        prompt_60s=mean(prompts, 60),
        generated_10s=mean(generated, 10),
        generated_60s=mean(generated, 60),
        prompt_by_second=[round(count) for count in prompts] if by_second else None,
        generated_by_second=[round(count) for count in generated] if by_second else None,
    )


def _without_maps(sample: Sample | None) -> EngineReport | None:
    if sample is None:
        return None
    pools = [msgspec.structs.replace(pool, page_map=None) for pool in sample.report.pools]
    return msgspec.structs.replace(sample.report, pools=pools)


@cache
def _versions() -> dict[str, str]:
    """Of sash and of what it stands on, read from the packages' descriptions: nothing is imported for it."""
    found = {"sash": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def stats_schema() -> dict[str, Any]:
    """JSON Schema of Stats, with everything in place: an OpenAPI description has no room for its own definitions."""
    (top,), parts = msgspec.json.schema_components([Stats], ref_template="{name}")

    def whole(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(name := node.get("$ref"), str):
                return whole(parts[name])
            return {key: whole(value) for key, value in node.items()}
        return [whole(item) for item in node] if isinstance(node, list) else node

    schema: dict[str, Any] = whole(top)
    return schema
