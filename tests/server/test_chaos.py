"""Three hundred clients that leave, time out, ask too much or the wrong thing, over sockets, on a real engine.

Afterwards nothing is left of them: every page is free, no task runs, no object of a request lives, memory is flat; and
who stayed to the end was answered as if alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from tests.engine.conftest import OPTIONS, save_tokenizer
from tests.families import build
from tests.server.apps import logged
from tests.server.malformed import Malformed, malformed

from sash.engine.async_engine import AsyncEngine, Submission
from sash.engine.frontend import Request
from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.text.load import load_tokenizer

COUNT = 300
BODY_LIMIT = 20_000
_TRIES = 1000
ENGINE = OPTIONS | {"deterministic": True, "max_num_seqs": 8, "max_num_batched_tokens": 64}
SETTINGS = ServerSettings("tiny", max_waiting=10, max_body_bytes=BODY_LIMIT, request_timeout_s=5)
Alone = list[list[tuple[str, str]]]
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Window layers of 5 and a full layer, 101 tokens."""
    _, folder = build("gemma3", tmp_path_factory.mktemp("tiny"))
    save_tokenizer(folder)
    return folder


@asynccontextmanager
async def serving(folder: Path, timeout_s: float) -> AsyncIterator[tuple[AsyncEngine, int]]:
    """A real engine behind a real socket; yields the engine and the port."""
    source = locate(folder)
    options = ENGINE | {"request_timeout_s": timeout_s}
    engine = AsyncEngine(str(folder), options, load_spec(source), load_tokenizer(source.path), max_waiting=10)
    app = create_app(engine, SETTINGS)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        web = asyncio.create_task(server._serve([sock]))
        try:
            await engine.start()
            yield engine, sock.getsockname()[1]
        finally:
            server.should_exit = True
            await web
            await engine.close()


def ask(i: int) -> tuple[str, dict[str, Any]]:
    """The i-th question of those that have one right answer: where to send it, and its body."""
    rng = random.Random(i)
    words = "".join(rng.choice("abc def.é\n") for _ in range(rng.randint(1, 30)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 10), "temperature": rng.choice([0, 0, 1.0]), "seed": i}
    if i % 3 == 0:
        return PATHS["chat"], body | {"messages": [{"role": "user", "content": words}]}
    if i % 3 == 1:
        return PATHS["completion"], body | {"prompt": words, "n": rng.randint(1, 2), "stop": ["q", "zz"]}
    return PATHS["completion"], body | {"prompt": [[5, 6, 7 + i], [40] * rng.randint(1, 20)], "logprobs": 1}


QUESTIONS = [ask(i) for i in range(15)]
GREEDY_LONG = {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True, "temperature": 0, "n": 2}
TOO_LONG = {"prompt": "a" * 100, "max_tokens": 5}


class Client:
    """One request over a socket of its own."""

    def __init__(self, port: int, path: str, body: bytes, headers: str = "Content-Type: application/json\r\n") -> None:
        self._port = port
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.data = head.encode() + body

    async def answer(self) -> tuple[int, bytes]:
        """Status and body, chunks joined."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self.data)
            whole = await reader.read()
        finally:
            writer.close()
        head, _, body = whole.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = unchunked(body)
        return int(head.split(b" ", 2)[1]), body

    async def leave(self, sent: int, read: int, wait_s: float) -> None:
        """Send so many bytes, read so many, wait, and cut the line."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self.data[:sent])
        if read:
            await reader.read(read)
        await asyncio.sleep(wait_s)
        writer.transport.abort()


def unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


def texts(body: bytes) -> list[tuple[str, str]]:
    """(text, finish reason) of each choice of a whole answer or of a stream's events."""
    if not body.startswith(b"data: "):
        choices = json.loads(body)["choices"]
        return [(c["message"]["content"] if "message" in c else c["text"], c["finish_reason"]) for c in choices]
    found: dict[int, list[str]] = {}
    ends: dict[int, str] = {}
    *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    for event in events:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found.setdefault(choice["index"], []).append(text)
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    return [("".join(found[i]), ends[i]) for i in sorted(found)]


class Chaos:
    """Clients of every kind against one server."""

    def __init__(self, port: int, alone: Alone, seed: int, count: int) -> None:
        self.port = port
        self.alone = alone
        self.count = count
        self.seed = seed
        self.seen: Counter[str] = Counter()
        self.bad = list(malformed(count, BODY_LIMIT, seed))

    async def run(self) -> None:
        """All clients, some at a time."""
        seats = asyncio.Semaphore(40)

        async def one(i: int) -> None:
            async with seats:
                await self.client(i, random.Random(f"{self.seed} {i}"))

        await asyncio.gather(*(one(i) for i in range(self.count)))

    async def client(self, i: int, rng: random.Random) -> None:
        await asyncio.sleep(rng.random() * 0.2)
        kind = rng.choices(
            ["whole", "stream", "leaves", "leaves_early", "half_sent", "gives_up", "long", "too_long", "malformed"],
            [4, 4, 5, 3, 2, 3, 1, 2, 3],
        )[0]
        number = rng.randrange(len(QUESTIONS))
        path, body = QUESTIONS[number]
        if kind == "malformed":
            await self.refused(self.bad[i])
        elif kind == "too_long":
            await self.expect(Client(self.port, PATHS["completion"], dump(TOO_LONG)), {400, 429}, kind)
        elif kind == "long":
            await self.expect(Client(self.port, PATHS["completion"], dump(GREEDY_LONG)), {200, 429, 504}, kind)
        elif kind in ("whole", "stream"):
            client = Client(self.port, path, dump(body | {"stream": kind == "stream"}))
            self.compare(number, await self.patient(client, rng, kind))
        else:
            await self.leaver(kind, rng, Client(self.port, path, dump(body | {"stream": rng.random() < 0.7})))

    async def patient(self, client: Client, rng: random.Random, kind: str) -> bytes:
        """The answer of one who comes again when the queue is full."""
        for _ in range(_TRIES):
            status, body = await self.expect(client, {200, 429, 504}, kind)
            if status != 429:
                return body if status == 200 else b""
            await asyncio.sleep(0.1 + rng.random() * 0.2)
        raise AssertionError("the queue was always full")

    async def leaver(self, kind: str, rng: random.Random, client: Client) -> None:
        size = len(client.data)
        if kind == "leaves":
            await client.leave(size, rng.choice([1, 300, 1000]), 0)
        elif kind == "leaves_early":
            await client.leave(size, 0, 0)
        elif kind == "half_sent":
            await client.leave(rng.randrange(size), 0, rng.random() * 0.1)
        else:
            await client.leave(size, 0, rng.random() * 0.5)
        self.seen[kind] += 1

    async def refused(self, request: Malformed) -> None:
        headers = f"Content-Type: {request.content_type}\r\n" if request.content_type else ""
        if request.content_encoding:
            headers += f"Content-Encoding: {request.content_encoding}\r\n"
        client = Client(self.port, request.path, request.body, headers)
        await self.expect(client, set(range(400, 429)), "malformed")

    async def expect(self, client: Client, statuses: set[int], kind: str) -> tuple[int, bytes]:
        try:
            status, body = await client.answer()
        except ConnectionError:  # refused before its body was read, and the line cut
            assert len(client.data) > BODY_LIMIT, kind
            self.seen["cut"] += 1
            return 0, b""
        assert status in statuses, (kind, status, body[:500], client.data[:500])
        self.seen[f"{kind} {status}"] += 1
        return status, body

    def compare(self, number: int, body: bytes) -> None:
        """A survivor's answer is the one that it would have had alone."""
        if not body:
            return
        if b'"code":"timeout"' in body or any(end == "timeout" for _, end in texts(body)):
            self.seen["timed out in the stream"] += 1
            return
        assert texts(body) == self.alone[number], number
        self.seen["survivor"] += 1


def dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())


async def idle(engine: AsyncEngine) -> None:
    """Wait until nothing runs any more, then find nothing held."""
    for _ in range(200):
        if not engine.num_open:
            break
        await asyncio.sleep(0.05)
    report = await engine.report()
    assert report.running == report.waiting == engine.num_open == 0 and report.failed_steps == 0
    for pool in report.pools:
        assert pool.free_pages == pool.num_pages and pool.held_pages == pool.promised_pages == 0
        assert pool.requests == {}
    assert engine._submissions == engine._accepting == engine._reports == {}


async def memory(engine: AsyncEngine) -> tuple[int, int]:
    """Resident bytes: the core's, ours."""
    assert engine._process is not None
    return psutil.Process(engine._process.pid).memory_info().rss, psutil.Process().memory_info().rss


async def one_by_one(port: int) -> Alone:
    return [texts((await Client(port, path, dump(body)).answer())[1]) for path, body in QUESTIONS]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """The answer to each question when nothing else runs."""

    async def whole() -> Alone:
        async with serving(folder, 300.0) as (_, port):
            return await one_by_one(port)

    with logged():
        return asyncio.run(whole())


async def rounds(folder: Path, alone: Alone, timeout_s: float, counts: list[int]) -> Counter[str]:
    """Rounds of chaos with nothing left after each; what was seen in the last."""
    async with serving(folder, timeout_s) as (engine, port):
        sizes: list[tuple[int, int]] = []
        tasks = asyncio.all_tasks()
        for number, count in enumerate(counts):
            chaos = Chaos(port, alone, number, count)
            await chaos.run()
            await idle(engine)
            await asyncio.sleep(0.2)  # connections close
            assert asyncio.all_tasks() == tasks
            assert alive(Submission) == alive(Request) == 0
            sizes.append(await memory(engine))
        # The first round fills caches: of the allocator, of templates, of connections.
        for before, after in zip(sizes[0], sizes[-1], strict=True):
            assert after - before < 8 << 20, sizes
        if timeout_s > 1:
            assert await one_by_one(port) == alone
        return chaos.seen


def run(folder: Path, alone: Alone, timeout_s: float, counts: list[int]) -> Counter[str]:
    with logged() as lines:
        seen = asyncio.run(rounds(folder, alone, timeout_s, counts))
    assert [line for line in lines if line["log_level"] in ("error", "critical")] == []
    return seen


def test_chaos_leaves_nothing_behind_and_survivors_are_answered_as_if_alone(folder: Path, alone: Alone) -> None:
    seen = run(folder, alone, 300.0, [40, COUNT])
    for kind in ("whole 429", "stream 200", "leaves", "leaves_early", "half_sent", "gives_up", "malformed 400"):
        assert seen[kind] > 3, seen
    assert seen["too_long 400"] + seen["too_long 429"] > 3, seen
    assert seen["survivor"] > COUNT / 5 and seen["whole 504"] + seen["timed out in the stream"] == 0, seen


def test_time_limits_leave_nothing_behind_either(folder: Path, alone: Alone) -> None:
    seen = run(folder, alone, 0.08, [30, 60])
    assert seen["long 504"] + seen["whole 504"] + seen["stream 504"] + seen["timed out in the stream"] > 2, seen
