"""The server as a process: sockets, signals, draining, and an engine that is started again when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import uvicorn

from sash.engine.async_engine import AsyncEngine
from sash.server.app import background, create_app
from sash.server.bounded import BoundedHttp
from sash.server.config import ServeConfig
from sash.server.sampling import generation_defaults
from sash.server.settings import ServerSettings
from sash.server.state import ServerState
from sash.spec.errors import ConfigError, EngineDeadError, SashError
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.spec.log import logger
from sash.text.load import load_tokenizer

_RESTARTS_WITHIN_S = 600.0
_FLUSH_S = 5


def serve(config: ServeConfig) -> int:
    """Serve until a signal or a lasting failure.

    Returns:
        The exit code: 0 after a drain, 1 where the engine failed for good.

    Raises:
        ConfigError, ModelError: the start was refused.
    """
    source = locate(config.model)
    spec = load_spec(source)
    sock = bind(config.settings)
    engine = AsyncEngine(
        config.model,
        config.engine | {"request_timeout_s": config.settings.request_timeout_s},
        spec,
        load_tokenizer(source.path),
        max_waiting=config.settings.max_waiting,
        log_format=config.settings.log_format,
    )
    app = create_app(engine, config.settings, generation_defaults(source.path))
    http = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        log_config=None,
        access_log=False,
        # The service enters it by itself: what it raises is to be seen, before anything is loaded.
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_FLUSH_S,
        ssl_certfile=config.settings.tls_cert,
        ssl_keyfile=config.settings.tls_key,
    )
    with asyncio.Runner(loop_factory=http.get_loop_factory()) as runner:
        return runner.run(Service(engine, app.state.server, _Server(http), sock).run())


def bind(settings: ServerSettings) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address is unknown, taken, or not allowed.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {settings.host!r} is no address of this machine ({getattr(error, 'strerror', None) or error}); "
            "127.0.0.1 is for this machine alone, 0.0.0.0 for all that reach it"
        ) from error
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{where} can't be listened on ({error.strerror}); use another --port, or 0 for a free one"
        ) from error
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: when to end is the service's decision."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """The life of a server.

    It listens at once (``/ready`` says 503 until the model has loaded). SIGTERM and SIGINT drain: new requests are
    refused, running ones get ``drain_s`` to finish, what is left then is told that it failed. A second signal cuts the
    drain short. An engine that ends is started again, at most ``max_restarts`` times in ten minutes.
    """

    def __init__(self, engine: AsyncEngine, state: ServerState, server: uvicorn.Server, sock: socket.socket) -> None:
        self._engine = engine
        self._state = state
        self._server = server
        self._socket = sock
        self._settings = state.settings
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failures: deque[float] = deque()

    async def run(self) -> int:
        """The exit code, after everything has ended. Raises what refused the start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._live()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _live(self) -> int:
        async with contextlib.AsyncExitStack() as ends:
            # The last to start is the first to end: jobs are put away before the engine ends under them, and clients
            # hear of its end before the web server leaves.
            web: asyncio.Task[None] | None = None
            tasks: list[asyncio.Task[Any]] = []

            async def end() -> None:
                for task in tasks:
                    task.cancel()
                await self._engine.close()
                self._server.should_exit = True
                if web is not None:
                    await web

            ends.push_async_callback(end)
            await ends.enter_async_context(background(self._state))
            web = asyncio.create_task(self._server.serve([self._socket]))
            watch = asyncio.create_task(self._keep_engine())
            stop = asyncio.create_task(self._stop.wait())
            tasks += [watch, stop]
            await asyncio.wait({web, watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            self._state.draining = True
            if stop.done() and not watch.done():
                await self._drain()
            failed = watch.result() if watch.done() else 0
        logger().info("stopped", exit_code=failed)
        return failed

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _drain(self) -> None:
        """Let what runs finish, for a while."""
        open_answers = self._engine.num_open
        logger().info("draining", open_answers=open_answers, drain_s=self._settings.drain_s)
        hurry = asyncio.create_task(self._hurry.wait())
        idle = asyncio.create_task(self._idle())
        await asyncio.wait({hurry, idle}, timeout=self._settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            logger().warning("drain_cut_short", open_answers=self._engine.num_open)
        hurry.cancel()
        idle.cancel()

    async def _idle(self) -> None:
        while self._engine.num_open:
            await asyncio.sleep(0.02)

    async def _keep_engine(self) -> int:
        """Start the engine, and start it again when it ends; 1 when that has happened too often."""
        await self._engine.start()
        self._announce()
        while True:
            reason = await self._engine.ended()
            now = time.monotonic()
            self._failures.append(now)
            while self._failures and now - self._failures[0] > _RESTARTS_WITHIN_S:
                self._failures.popleft()
            logger().error("engine_ended", reason=reason, failures=len(self._failures))
            if len(self._failures) > self._settings.max_restarts:
                logger().error("giving_up", max_restarts=self._settings.max_restarts)
                return 1
            await self._engine.close()
            try:
                await self._engine.start()
            except EngineDeadError as error:
                logger().error("restart_failed", error=str(error))
                await asyncio.sleep(2 ** len(self._failures))
            except SashError as error:  # the model's files have changed, or memory is short now
                logger().error("restart_refused", error=str(error))
                return 1
            else:
                logger().info("engine_restarted", failures=len(self._failures))

    def _announce(self) -> None:
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self._settings.tls_cert else "http"
        shown = f"[{host}]" if ":" in host else host
        info = self._engine.info
        logger().info(
            "serving",
            url=f"{scheme}://{shown}:{port}",
            model=self._settings.model_name,
            max_model_len=info.max_model_len if info else None,
            dtype=info.dtype if info else None,
            quantization=info.quantization if info else None,
        )
