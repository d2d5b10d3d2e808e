"""What the server counts and how Prometheus gets it, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.apps import fake_engine, serve
from tests.server.fake import FakeEngine
from tests.server.telemetry.test_histograms import FakeClock

from sash.engine.messages import AddRequest
from sash.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sash.engine.report import EngineReport
from sash.server.telemetry import reports
from sash.server.telemetry.metrics import Metrics
from sash.spec.sampling import SamplingParams

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
ROOT = Path(__file__).parents[3]


async def scrape(client: httpx.AsyncClient) -> Series:
    """All series by name and labels."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    """The only series of this name that has these labels."""
    found = [v for (n, have), v in series.items() if n == name and frozenset(labels.items()) <= have]
    assert len(found) == 1, f"{name} {labels}: {len(found)} series"
    return found[0]


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 5} | fields)


# ------------------------------------------------------------------------- what is told


def test_requests_are_counted_and_timed_under_both_names() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await complete(client)).status_code == 200
        assert (await complete(client, stream=True)).status_code == 200
        assert (await complete(client, n=3, temperature=1.0, max_tokens=2)).status_code == 200
        series = await scrape(client)
        assert value(series, "sash:requests_total", finish_reason="length") == 5
        assert value(series, "vllm:request_success_total", finished_reason="length") == 5
        for prefix in ("sash", "vllm"):
            for name, count in (
                ("time_to_first_token_seconds", 3),
                ("inter_token_latency_seconds", 4 + 4 + 3),
                ("request_time_per_output_token_seconds", 5),
                ("e2e_request_latency_seconds", 3),
                ("request_decode_time_seconds", 3),
                ("request_params_n", 3),
            ):
                assert value(series, f"{prefix}:{name}_count") == count, name
                assert value(series, f"{prefix}:{name}_bucket", le="+Inf") == count
            assert value(series, f"{prefix}:request_prompt_tokens_sum") == 15
            assert value(series, f"{prefix}:request_generation_tokens_sum") == 5 + 5 + 6
            assert value(series, f"{prefix}:request_params_n_sum") == 5
        assert value(series, "sash:requests_open") == 0
        assert value(series, "sash:http_responses_total", status="200") == 3
        assert value(series, "sash:http_received_bytes_total") > 100

    serve(test)


def test_the_engines_numbers_are_those_of_its_report() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        series = await scrape(client)
        for name, wanted in {
            "sash:requests_running": 1,
            "vllm:num_requests_running": 1,
            "vllm:num_requests_waiting": 0,
            "sash:prompt_tokens_total": 30,
            "vllm:prompt_tokens_total": 30,
            "vllm:generation_tokens_total": 9,
            "sash:engine_busy_seconds_total": 1.5,
            "sash:uniform_cache_peak_bytes": 1 << 20,
            "sash:engine_up": 1,
            "vllm:iteration_tokens_total_count": 10,
        }.items():
            assert value(series, name) == wanted, name
        assert value(series, "vllm:iteration_tokens_total_bucket", le="1.0") == 9
        assert value(series, "vllm:iteration_tokens_total_bucket", le="16.0") == 9
        assert value(series, "vllm:iteration_tokens_total_bucket", le="32.0") == 10
        for state, pages in (("free", 9), ("held", 3), ("cached", 0)):
            assert value(series, "sash:pool_pages", pool="window", state=state) == pages
            assert value(series, "sash:pool_bytes", pool="window", state=state) == pages * 1024
        assert value(series, "sash:pool_total_bytes", pool="window") == 12 * 1024
        assert value(series, "sash:pool_slid_pages_total", pool="window") == 40
        assert value(series, "sash:pool_written_rows_total", pool="window") == 200
        assert value(series, "sash:kv_usage_ratio") == value(series, "vllm:kv_cache_usage_perc") == 0.25
        assert value(series, "sash:requests_waiting", reason="pages") == 0
        assert value(series, "sash:process_resident_bytes", process="server") > 1 << 20
        assert value(series, "sash:device_memory_bytes", state="total") > 1 << 28

    serve(test)


def test_rejects_are_counted_by_reason() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await complete(client, temperature=-1)
        await complete(client, model="other")
        await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        await client.get("/nowhere")
        await client.get("/v1/completions")
        await client.get("/v1/jobs")
        engine.overloaded = True
        await complete(client)
        engine.overloaded, engine.alive = False, False
        await complete(client)
        app: Any = client._transport.app  # type: ignore[attr-defined]
        app.state.server.draining = True
        await complete(client)
        series = await scrape(client)
        rejected = {reason: value(series, "sash:rejected_requests_total", reason=reason) for reason in REASONS}
        ones = ("model_not_found", "overloaded", "not_ready", "draining")
        assert rejected == {"invalid": 2, "unauthorized": 0, **dict.fromkeys(ones, 1)}

    REASONS = ("invalid", "model_not_found", "overloaded", "not_ready", "draining", "unauthorized")
    engine = fake_engine()
    serve(test, engine)


def test_a_wrong_key_is_a_reject_and_reads_no_metrics() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await complete(client)).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        series = await scrape(client)
        assert value(series, "sash:rejected_requests_total", reason="unauthorized") == 1

    serve(test, api_keys=("secret",))


def test_an_answer_that_fails_or_dies_counts_as_an_error() -> None:
    def failing(message: AddRequest, answer: int) -> list[int | str]:
        return [40, 41, "error"]

    async def failed(client: httpx.AsyncClient) -> None:
        await complete(client)
        assert value(await scrape(client), "sash:requests_total", finish_reason="error") == 1

    async def died(client: httpx.AsyncClient) -> None:
        assert (await complete(client)).status_code == 500
        series = await scrape(client)
        assert value(series, "sash:requests_total", finish_reason="error") == 1
        assert value(series, "sash:requests_total", finish_reason="cancelled") == 0
        assert value(series, "sash:requests_open") == 0

    serve(failed, fake_engine(script=failing))
    serve(died, fake_engine(die_after=2))


def test_no_jobs_are_told_where_there_is_no_store() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert not [name for name, _ in await scrape(client) if name == "sash:jobs"]

    serve(test)


# ------------------------------------------------------------------------- bounds


def test_requests_make_no_series() -> None:
    """Whatever clients send, after the first answer of each kind there is nothing new to store."""

    async def test(client: httpx.AsyncClient) -> None:
        async def some(i: int) -> None:
            await complete(client, prompt=f"text {i}", max_tokens=1 + i % 7, user=f"user-{i}", seed=i)
            await complete(client, model=f"model-{i}")
            await client.get(f"/nowhere/{i}", headers={"x-request-id": f"id-{i}"})
            await client.request("BREW", "/v1/completions")

        await some(0)
        before = await scrape(client)
        for i in range(1, 40):
            await some(i)
        after = await scrape(client)
        assert after.keys() == before.keys()
        assert len(after) < 1000

    serve(test)


class Stuck(FakeEngine):
    """Tells one report and then no more."""

    asked = 0

    async def report(self, *, page_maps: bool = False, timeout_s: float = 10.0) -> EngineReport:
        self.asked += 1
        if self.asked > 1:
            await asyncio.sleep(3600)
        return await super().report(page_maps=page_maps, timeout_s=timeout_s)


def test_a_dead_engine_is_told_and_its_numbers_are_not() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert value(await scrape(client), "sash:engine_up") == 1
        engine.alive = False
        series = await scrape(client)
        assert value(series, "sash:engine_up") == 0
        assert not any(name.startswith(("sash:pool", "sash:requests_running")) for name, _ in series)
        engine.alive, engine.starts = True, 2
        series = await scrape(client)
        assert value(series, "sash:engine_restarts_total") == 1 and value(series, "sash:requests_running") == 1

    engine = fake_engine()
    serve(test, engine)


def test_an_engine_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_PATIENCE_S", 0.05)

    async def test(client: httpx.AsyncClient) -> None:
        await scrape(client)
        app: Any = client._transport.app  # type: ignore[attr-defined]
        clock = FakeClock(time.monotonic() + 100)
        app.state.server.metrics.clock = clock
        series = await asyncio.wait_for(scrape(client), 10)
        assert value(series, "sash:requests_running") == 1, "what was last known"
        assert value(series, "sash:engine_report_age_seconds") > 99

    base = fake_engine()
    serve(test, Stuck(base.spec, base.tokenizer))


def test_many_who_ask_at_once_cost_one_report() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(client.get("/metrics") for _ in range(5)), *(client.get("/stats") for _ in range(5)))
        assert engine.asked == 1

    base = fake_engine()
    engine = Stuck(base.spec, base.tokenizer)
    serve(test, engine)


# ------------------------------------------------------------------------- durations


def test_durations_count_from_when_the_engine_was_asked() -> None:
    clock = FakeClock(100.0)
    metrics = Metrics(clock)
    times = RequestMetrics(queue_s=0.5, first_token_s=1.5)
    whole = RequestOutput("0", None, [1, 2, 3], [CompletionOutput(0), CompletionOutput(1)], metrics=times)

    def delta(index: int, tokens: int, reason: str | None = None) -> RequestOutput:
        return RequestOutput(
            "0", None, [], [CompletionOutput(index, token_ids=[7] * tokens, finish_reason=reason)], metrics=times
        )

    seen = metrics.on_start(whole, SamplingParams(n=2, max_tokens=9), 99.0)
    clock.now = 101.0
    seen.on_deltas([delta(0, 1), delta(1, 1)])
    clock.now = 101.5
    seen.on_deltas([delta(0, 2)])
    clock.now = 102.0
    seen.on_deltas([delta(0, 1, "stop"), delta(1, 1)])
    clock.now = 103.0
    seen.on_end()
    seen.on_end()
    sums = {name: getattr(metrics, name) for name in ("first_token", "inter_token", "per_token", "whole", "queue")}
    assert {name: (sum(timing.whole.counts), timing.whole.sum) for name, timing in sums.items()} == {
        "first_token": (1, 2.0),
        "inter_token": (3, 0.5 + 0.5 + 1.0),
        "per_token": (1, pytest.approx(1 / 3)),
        "whole": (1, 4.0),
        "queue": (1, 0.5),
    }
    assert (metrics.prefill.sum, metrics.decode.sum, metrics.inference.sum) == (1.0, 1.0, 3.5)
    assert (metrics.generated_tokens.sum, metrics.longest_answer.sum, metrics.open_requests) == (6, 4, 0)
    assert metrics.finished["stop"] == 1 and metrics.finished["cancelled"] == 1


def test_names_keep_their_colon_whatever_format_the_scraper_prefers() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        client.headers["accept"] = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        names = {name for name, _ in await scrape(client)}
        assert names and all(name.startswith(("sash:", "vllm:")) for name in names)

    serve(test)


def test_the_table_of_metrics_is_complete() -> None:
    """docs/metrics.md names every family that is written, and no other; dashboard and alerts use none but these."""

    async def counts() -> dict[str, int]:
        return {"running": 1}

    async def test(client: httpx.AsyncClient) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        app.state.server.jobs = SimpleNamespace(counts=counts)
        families = list(text_string_to_metric_families((await client.get("/metrics")).text))
        named = set(re.findall(r"`((?:sash|vllm):\w+?)(?:_total)?`", (ROOT / "docs/metrics.md").read_text("utf-8")))
        assert {family.name.removesuffix("_total") for family in families} == named
        samples = {sample.name for family in families for sample in family.samples}
        for file in ("docs/metrics.md", "deploy/grafana/sash.json", "deploy/prometheus/alerts.yml"):
            used = set(re.findall(r"sash:\w+(?=\\?[{\[])", (ROOT / file).read_text("utf-8")))
            assert used and used <= samples, f"{file} uses {used - samples}"

    serve(test)
