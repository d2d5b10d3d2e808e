"""A scripted engine with true books, a server around it on a port, and a browser."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from tests.server.apps import SPEC
from tests.server.fake import FakeEngine
from tests.text.fakes import ByteTokenizer

from sash.engine.report import EngineReport, PoolReport, RequestReport
from sash.kv.ledger.ledger import Ledger
from sash.server.app import create_app
from sash.server.engine import ServingEngine
from sash.server.settings import ServerSettings
from sash.spec.footprint import uniform_bytes
from sash.spec.groups import GroupSpec
from sash.spec.sizing import Demand
from sash.spec.span import Span

WINDOW = 40
# An answer whose prompt is longer than the window, of tokens that are letters.
PROMPT = "a sash window slides " * 4


class LiveEngine(FakeEngine):
    """Reports what a ledger of a window and a full group holds of the requests that are open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SPEC, ByteTokenizer(), **options)
        groups = (
            GroupSpec("window", Span.sliding(WINDOW), (0, 1, 2), 1, 8, 8),
            GroupSpec("full", Span.full(), (3,), 1, 8, 8),
        )
        self.demand = Demand(groups, ("float32", "float32"), 4, 512, 4)
        self.ledger = Ledger(self.demand, tuple(4 * pages for pages in self.demand.request_pages()))
        self.rows: dict[str, int] = {}

    def step(self) -> list[RequestReport]:
        """Give every open request the pages of what it has by now."""
        told = []
        asked = self.frontend._by_answer
        for gone in self.rows.keys() - asked.keys():
            self.ledger.release(gone)
            del self.rows[gone]
        for answer_id, request in asked.items():
            prompt, params = len(request.message.prompt_token_ids), request.message.params
            generated = len(request.answers[answer_id].output.token_ids)
            limit = prompt + (params.max_tokens or 16)
            if answer_id not in self.rows:
                assert self.ledger.admit(answer_id, prompt, prompt, limit)
                self.rows[answer_id] = 0
            end = prompt + max(generated - 1, 0)
            if end > self.rows[answer_id]:
                assert self.ledger.reserve(answer_id, self.rows[answer_id], end - self.rows[answer_id]) is not None
                self.rows[answer_id] = end
            told.append(RequestReport(answer_id, "decode", prompt, end, generated, params.max_tokens or 16, 0))
        return told

    async def report(self, *, page_maps: bool = False, timeout_s: float = 10.0) -> EngineReport:
        base = await super().report(page_maps=page_maps, timeout_s=timeout_s)
        requests, demand = self.step(), self.demand
        holders = {name: self.ledger.request_pages(name) for name in self.ledger.requests}
        pools = [
            PoolReport(
                name=group.name,
                span=group.span.describe(),
                layers=len(group.layers),
                dtype="float32",
                page_size=4,
                page_bytes=page_bytes,
                num_pages=pool.total,
                free_pages=pool.free,
                held_pages=pool.held,
                promised_pages=pool.promised,
                peak_pages=pool.peak,
                longest_pages=longest,
                slid_pages=pool.slid,
                written_rows=pool.written_rows,
                requests={name: pages[group.name] for name, pages in holders.items()},
                page_map=self.ledger.page_map(i) if page_maps else None,
                kind=group.span.kind.value,
                window=group.span.window,
            )
            for i, (group, pool, page_bytes, longest) in enumerate(
                zip(demand.groups, self.ledger.stats(), demand.page_bytes(), demand.request_pages(), strict=True)
            )
        ]
        uniform = sum(uniform_bytes(demand.groups, rows, 4, demand.dtypes) for rows in self.rows.values())
        return EngineReport(
            pools=pools,
            requests=requests,
            max_model_len=512,
            max_num_seqs=4,
            running=len(requests),
            waiting=0,
            waiting_for={},
            steps=base.steps,
            failed_steps=0,
            preemptions=0,
            prompt_tokens=sum(map(len, self.prompts)),
            generation_tokens=base.generation_tokens,
            draft_tokens=0,
            accepted_tokens=0,
            uniform_peak_bytes=uniform,
            busy_s=base.busy_s,
            step_tokens=base.step_tokens,
            uniform_bytes=uniform,
        )


async def _nothing() -> None:
    pass


@contextmanager
def served(
    engine: ServingEngine,
    *,
    port: int = 0,
    start: Callable[[], Awaitable[object]] = _nothing,
    stop: Callable[[], Awaitable[object]] = _nothing,
    **settings: Any,
) -> Iterator[str]:
    """The real app on a port of this machine, in a thread; gives its address. ``start`` and ``stop`` run there too."""
    app = create_app(engine, ServerSettings(**({"model_name": "tiny"} | settings)))
    config = uvicorn.Config(app, port=port, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=2)
    server, failed = uvicorn.Server(config), []

    async def whole() -> None:
        try:
            await start()
            await server.serve()
        finally:
            await stop()

    def run() -> None:
        try:
            asyncio.run(whole())
        except BaseException as error:  # whatever it is, the test must hear of it
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        assert not failed, failed
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        app.state.server.draining = True  # whoever watches is sent away
        server.should_exit = True
        thread.join(60)
    assert not failed, failed


@contextmanager
def chromium() -> Iterator[Any]:
    """The system's Chromium without a window; skips where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on PATH; make e2e installs it")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()
