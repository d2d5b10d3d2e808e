"""Exposition: the numbers of metrics, engine and machine in Prometheus' format.

Every family is ``sash:…``; where vLLM has one of the same meaning, it is written a second time under that name. Labels
come from the settings, the model and fixed lists, never from requests, so that there is a bounded number of series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sash import __version__
from sash.engine.report import EngineReport, PoolReport
from sash.server.state import ServerState
from sash.server.telemetry.histograms import Histogram
from sash.server.telemetry.reports import Machine, Sample

# Whatever the scraper would like best: prometheus-client's OpenMetrics writer makes sash_ of sash:.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
# vLLM's word for what has no end of its own.
_THEIR_REASONS = {"cancelled": "abort", "timeout": "abort"}
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
Labels = Mapping[str, str]
Family = Callable[..., GaugeMetricFamily | CounterMetricFamily]


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape shows. ``sample`` is None when the engine is dead or has never answered, ``jobs`` (by state)
    where there is no store."""

    sample: Sample | None
    machine: Machine
    jobs: Mapping[str, int] | None


class Exposition(Collector):
    """All families of one server, in a registry of its own.

    Args:
        state: the server's.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._scrape: Scrape | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self, scrape: Scrape) -> bytes:
        """The text."""
        self._scrape = scrape
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        if self._scrape is None:
            return
        names = _Names(self._state.settings.model_name)
        sample, state = self._scrape.sample, self._state
        yield from _server(names, state, self._scrape)
        yield from _requests(names, state)
        yield from _machine(names, self._scrape.machine)
        if sample is not None:
            yield from _engine(names, sample.report)
            yield from _pools(names, sample.report.pools)


class _Names:
    """Makes families, and their twins under vLLM's names."""

    def __init__(self, model_name: str) -> None:
        self.ours = {"model_name": model_name}
        self.theirs = {"model_name": model_name, "engine": "0"}

    def _twins(self, sash: str, vllm: str | None) -> Iterator[tuple[str, Labels]]:
        yield f"sash:{sash}", self.ours
        if vllm is not None:
            yield f"vllm:{vllm}", self.theirs

    def gauge(self, name: str, text: str, value: float, vllm: str | None = None) -> Iterator[Metric]:
        """One number that goes up and down."""
        return self.gauges(name, text, [({}, value)], vllm)

    def gauges(
        self, name: str, text: str, values: Iterable[tuple[Labels, float]], vllm: str | None = None
    ) -> Iterator[Metric]:
        """Numbers that go up and down, by label."""
        return self._scalars(GaugeMetricFamily, name, text, values, vllm)

    def counter(self, name: str, text: str, value: float, vllm: str | None = None) -> Iterator[Metric]:
        """One number that goes up; ``_total`` is put behind its name."""
        return self.counters(name, text, [({}, value)], vllm)

    def counters(
        self, name: str, text: str, values: Iterable[tuple[Labels, float]], vllm: str | None = None
    ) -> Iterator[Metric]:
        """Numbers that go up, by label."""
        return self._scalars(CounterMetricFamily, name, text, values, vllm)

    def _scalars(
        self, family: Family, name: str, text: str, values: Iterable[tuple[Labels, float]], vllm: str | None
    ) -> Iterator[Metric]:
        values = list(values)
        for full, fixed in self._twins(name, vllm):
            yield _filled(family, full, text, fixed, values)

    def vllm(self, family: Family, name: str, text: str, values: Sequence[tuple[Labels, float]]) -> Metric:
        """A family that only vLLM has like this."""
        return _filled(family, f"vllm:{name}", text, self.theirs, values)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Iterator[Metric]:
        """A distribution that has the same name at vLLM."""
        return self.buckets(name, text, list(histogram.buckets()), histogram.sum, name)

    def buckets(
        self, name: str, text: str, buckets: Sequence[tuple[float, int]], total: float, vllm: str
    ) -> Iterator[Metric]:
        """A distribution from (bound, values up to it) and the sum of all values."""
        told = [(floatToGoString(bound), float(count)) for bound, count in buckets]
        for full, fixed in self._twins(name, vllm):
            metric = HistogramMetricFamily(full, text, labels=list(fixed))
            metric.add_metric(list(fixed.values()), told, total)
            yield metric

    def info(self, name: str, text: str, values: Labels) -> Iterator[Metric]:
        """Facts as labels."""
        metric = InfoMetricFamily(f"sash:{name}", text, labels=list(self.ours))
        metric.add_metric(list(self.ours.values()), dict(values))
        yield metric


def _filled(family: Family, name: str, text: str, fixed: Labels, values: Sequence[tuple[Labels, float]]) -> Metric:
    labels = list(values[0][0]) if values else []
    metric = family(name, text, labels=[*fixed, *labels])
    for given, value in values:
        metric.add_metric([*fixed.values(), *(given[key] for key in labels)], value)
    return metric


def _server(names: _Names, state: ServerState, scrape: Scrape) -> Iterator[Metric]:
    metrics, engine, traffic = state.metrics, state.engine, state.traffic
    info = {"version": __version__}
    if engine.info is not None:
        info |= {"dtype": engine.info.dtype, "quantization": engine.info.quantization}
    yield from names.info("server", "Version of sash, and how the model is stored", info)
    yield from names.gauge("uptime_seconds", "Since the server started", metrics.clock() - metrics.started_s)
    yield from names.gauge("engine_up", "1 while the engine runs and has loaded", float(engine.alive))
    yield from names.counter("engine_restarts", "Starts of the engine after the first", max(engine.starts - 1, 0))
    if scrape.sample is not None:
        age_s = max(metrics.clock() - scrape.sample.taken_s, 0.0)
        yield from names.gauge("engine_report_age_seconds", "Since the engine told the numbers below", age_s)
    yield from names.counter("http_received_bytes", "Bytes of request bodies", traffic.bytes_in)
    yield from names.counter("http_sent_bytes", "Bytes of answers' bodies", traffic.bytes_out)
    answers = [({"status": str(status)}, count) for status, count in sorted(traffic.statuses.items())]
    yield from names.counters("http_responses", "HTTP requests by the status of the answer", answers)
    if scrape.jobs is not None:
        jobs = [({"state": name}, count) for name, count in scrape.jobs.items()]
        yield from names.gauges("jobs", "Jobs in the store by state", jobs)


def _requests(names: _Names, state: ServerState) -> Iterator[Metric]:
    m = state.metrics
    yield from names.gauge("requests_open", "Prompts under way, waiting ones included", m.open_requests)
    ended = m.finished.items()
    yield from names.counters("requests", "Answers by how they ended", [({"finish_reason": r}, c) for r, c in ended])
    theirs = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for reason, count in ended:
        theirs[_THEIR_REASONS.get(reason, reason)] += count
    told = [({"finished_reason": reason}, count) for reason, count in theirs.items()]
    yield names.vllm(CounterMetricFamily, "request_success", "Answers by how they ended", told)
    rejects = [({"reason": reason}, count) for reason, count in m.rejected.items()]
    yield from names.counters("rejected_requests", "HTTP requests for tokens that were turned away", rejects)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From asking the engine to a prompt's first token", m.first_token.whole),
        ("inter_token_latency_seconds", "Between two deliveries of tokens of an answer", m.inter_token.whole),
        ("request_time_per_output_token_seconds", "Of an answer, mean after its first token", m.per_token.whole),
        ("e2e_request_latency_seconds", "From asking the engine to the end of all answers", m.whole.whole),
        ("request_queue_time_seconds", "From asking the engine to the first step", m.queue.whole),
        ("request_inference_time_seconds", "From the first step to the end", m.inference),
        ("request_prefill_time_seconds", "From the first step to the first token", m.prefill),
        ("request_decode_time_seconds", "From the first token to the last", m.decode),
        ("request_prompt_tokens", "Tokens of a prompt", m.prompt_tokens),
        ("request_generation_tokens", "Tokens of all answers to a prompt", m.generated_tokens),
        ("request_max_num_generation_tokens", "Tokens of a prompt's longest answer", m.longest_answer),
        ("request_params_max_tokens", "max_tokens where it was given", m.max_tokens),
        ("request_params_n", "Answers asked for", m.answers),
    ):
        yield from names.histogram(name, text, histogram)


def _engine(names: _Names, report: EngineReport) -> Iterator[Metric]:
    yield from names.gauge("requests_running", "Answers that run", report.running, "num_requests_running")
    now, peak = report.uniform_bytes, report.uniform_peak_bytes
    yield from names.gauge("uniform_cache_bytes", "What one cache without windows would hold now", now)
    yield from names.gauge("uniform_cache_peak_bytes", "What it would have held at its peak", peak)
    waiting = [({"reason": r}, report.waiting_for.get(r, 0)) for r in ("seats", "pages", "turn")]
    yield from names.gauges("requests_waiting", "Answers that wait, by what they wait for", waiting)
    for name, labels in (("num_requests_waiting", {}), ("num_requests_waiting_by_reason", {"reason": "capacity"})):
        yield names.vllm(GaugeMetricFamily, name, "Answers that wait", [(labels, report.waiting)])
    for name, text, value, vllm in (
        ("prompt_tokens", "Tokens of prompts that were computed", report.prompt_tokens, "prompt_tokens"),
        ("generation_tokens", "Tokens that were drawn", report.generation_tokens, "generation_tokens"),
        ("preemptions", "Requests that gave their pages away", report.preemptions, "num_preemptions"),
        ("draft_tokens", "Tokens that were guessed", report.draft_tokens, "spec_decode_num_draft_tokens"),
        ("accepted_tokens", "Of them right", report.accepted_tokens, "spec_decode_num_accepted_tokens"),
        ("steps", "Steps of the engine", report.steps, None),
        ("failed_steps", "Steps that raised", report.failed_steps, None),
        ("engine_busy_seconds", "Time spent in steps", report.busy_s, None),
    ):
        yield from names.counter(name, text, value, vllm)
    buckets = []
    for bound in _STEP_TOKENS:
        buckets.append((float(bound), sum(n for size, n in report.step_tokens.items() if size <= bound)))
    buckets.append((float("inf"), sum(report.step_tokens.values())))
    text = "Tokens that a step computed, rounded up to a power of two"
    yield from names.buckets("step_tokens", text, buckets, report.computed_tokens, "iteration_tokens_total")


def _pools(names: _Names, pools: Sequence[PoolReport]) -> Iterator[Metric]:
    states: list[tuple[Labels, PoolReport, int]] = []
    for pool in pools:
        for state, pages in (("free", pool.free_pages), ("held", pool.held_pages), ("cached", pool.cached_pages)):
            states.append(({"pool": pool.name, "state": state}, pool, pages))
    yield from names.gauges("pool_pages", "Pages by state", [(labels, pages) for labels, _, pages in states])
    sized = [(labels, pages * pool.page_bytes) for labels, pool, pages in states]
    yield from names.gauges("pool_bytes", "Bytes of the pages by state", sized)

    def each(value: Callable[[PoolReport], float]) -> list[tuple[Labels, float]]:
        return [({"pool": pool.name}, value(pool)) for pool in pools]

    yield from names.gauges("pool_total_pages", "Pages that there are", each(lambda p: p.num_pages))
    yield from names.gauges("pool_total_bytes", "Their bytes", each(lambda p: p.num_pages * p.page_bytes))
    yield from names.gauges("pool_promised_pages", "Free pages set aside", each(lambda p: p.promised_pages))
    yield from names.gauges("pool_peak_pages", "Most pages ever held", each(lambda p: p.peak_pages))
    yield from names.counters("pool_slid_pages", "Pages that a window moved past", each(lambda p: p.slid_pages))
    yield from names.counters("pool_written_rows", "K and V rows stored", each(lambda p: p.written_rows))
    if pools:
        fullest = max(pool.held_pages / pool.num_pages for pool in pools)
        yield from names.gauge("kv_usage_ratio", "Of the fullest pool", fullest, "kv_cache_usage_perc")


def _machine(names: _Names, machine: Machine) -> Iterator[Metric]:
    uses = machine.processes
    each = [{"process": use.process} for use in uses]
    used = zip(each, (use.cpu_s for use in uses), strict=True)
    yield from names.counters("process_cpu_seconds", "Processor time of server and core", used)
    for name, text, values in (
        ("process_resident_bytes", "Memory of server and core", [use.resident_bytes for use in uses]),
        ("process_threads", "Threads of server and core", [use.threads for use in uses]),
        ("process_open_files", "Open files of server and core", [use.open_files for use in uses]),
    ):
        yield from names.gauges(name, text, zip(each, values, strict=True))
    device = machine.device
    busy = [({"device": device.device, "state": s}, v) for s, v in (("busy", device.busy_s), ("idle", device.idle_s))]
    yield from names.counters("device_seconds", "Time of the device's processors, whoever uses them", busy)
    memory = (("total", device.memory_bytes), ("available", device.available_bytes))
    told = [({"device": device.device, "state": state}, value) for state, value in memory]
    yield from names.gauges("device_memory_bytes", "The device's memory", told)
