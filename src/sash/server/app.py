"""create_app: routes, errors and middleware around an engine; no socket, no process, no global state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from sash import __version__
from sash.server.engine import ServingEngine
from sash.server.errors import ApiError, as_api_error, as_field_error, error_response
from sash.server.jobs.service import running_jobs
from sash.server.middleware import layers, needs_no_key, note
from sash.server.routes import chat, completions, health, jobs, metrics, models, page, responses, stats, tokenize
from sash.server.settings import ServerSettings
from sash.server.state import ServerState
from sash.server.telemetry.exposition import Exposition
from sash.spec.errors import ConfigError, ModelError, SashError
from sash.text.chat import check_template

ROUTERS = (
    health.router,
    models.router,
    completions.router,
    chat.router,
    responses.router,
    jobs.router,
    tokenize.router,
    stats.router,
    metrics.router,
    page.router,
)


def create_app(
    engine: ServingEngine, settings: ServerSettings, default_sampling: Mapping[str, float] | None = None
) -> FastAPI:
    """The server as an ASGI app. Its lifespan is ``background``.

    Args:
        engine: answers; may still be loading.
        settings: of the service.
        default_sampling: values for requests that give none (``sash.server.sampling.generation_defaults``).

    Raises:
        ConfigError: the settings name a chat template that can't be read.
    """
    state = ServerState(engine, settings, _read_template(settings), default_sampling or {})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with background(state):
            yield

    app = FastAPIOffline(
        redoc_url=None,
        lifespan=lifespan,
        title="sash",
        version=__version__,
        middleware=[Middleware(layer, **arguments) for layer, arguments in layers(state)],
        exception_handlers={
            SashError: _on_sash_error,
            RequestValidationError: _on_validation_error,
            HTTPException: _on_http_error,
            RecursionError: _on_recursion_error,
        },
    )
    app.state.server = state
    app.state.exposition = Exposition(state)
    for router in ROUTERS:
        app.include_router(router)
    if settings.api_keys:
        _describe_keys(app)
    return app


@asynccontextmanager
async def background(state: ServerState) -> AsyncIterator[None]:
    """What goes on beside requests: jobs, and answers in the background.

    Raises:
        ConfigError: the jobs store is another server's, or broken.
    """
    async with running_jobs(state):
        yield
    await state.responses.close()


def _describe_keys(app: FastAPI) -> None:
    """Say in the OpenAPI document which routes want a key."""
    describe = app.openapi

    def with_keys() -> dict[str, Any]:
        document = describe()
        document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            if not needs_no_key(path):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
        return document

    app.openapi = with_keys  # type: ignore[method-assign]


def _read_template(settings: ServerSettings) -> str | None:
    if settings.chat_template is None:
        return None
    try:
        text = settings.chat_template.read_text(encoding="utf-8")
        check_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {settings.chat_template} can't be read ({error}); name a Jinja file in UTF-8"
        ) from error
    except ModelError as error:
        raise ConfigError(f"chat_template {settings.chat_template}: {error}") from error
    return text


# Handlers are coroutines because plain functions would run in threads.


async def _on_sash_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SashError)
    return _refused(request, as_api_error(error))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _refused(request, as_field_error(error))


async def _on_recursion_error(request: Request, error: Exception) -> Response:
    """Bodies are read at one depth of the stack and used at another, where they may be nested too deeply."""
    return _refused(request, ApiError(400, "the body is nested too deeply"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods, bodies that are no JSON."""
    assert isinstance(error, HTTPException)
    told = str(error.detail)
    if error.status_code == 404:
        told = f"there is no {request.url.path[:200]} here; /docs lists what is"
    elif error.status_code == 405:
        told = f"{request.method[:20]} is not allowed on {request.url.path[:200]}"
    return _refused(request, ApiError(error.status_code, told, headers=dict(error.headers or {})))


def _refused(request: Request, error: ApiError) -> Response:
    """The answer; the log gets no message, which may quote a prompt."""
    note(request.scope, error=error.code or str(error.status), **({"param": error.param} if error.param else {}))
    return error_response(error)
