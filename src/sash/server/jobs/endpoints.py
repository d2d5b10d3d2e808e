"""The endpoints whose requests a job may hold: checked when it comes, run in this process when it is their turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from sash.server.errors import ApiError, as_api_error, as_field_error, error_bytes
from sash.server.jobs.records import Pending
from sash.server.jobs.runner import NotReadyError
from sash.server.protocol.chat import ChatRequest
from sash.server.protocol.common import Body
from sash.server.protocol.completions import CompletionRequest
from sash.server.protocol.responses import ResponseRequest
from sash.server.routes import chat, completions, responses
from sash.server.serving import Work, whole_answer
from sash.server.state import ServerState
from sash.spec.errors import EngineDeadError, OverloadedError, SashError
from sash.spec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How an endpoint reads a body (``form``), what it checks without a prompt (``params_of``), the work that comes of
    it (``prepare``), and how many prompts a body has (``count``)."""

    form: type[Body]
    params_of: Callable[[Any, ServerState], SamplingParams]
    prepare: Callable[[Any, ServerState], Awaitable[Work]]
    count: Callable[[Any], int] = lambda body: 1


ENDPOINTS = {
    "/v1/completions": Endpoint(
        CompletionRequest, completions.params_of, completions.prepare, lambda body: len(completions.listed(body))
    ),
    "/v1/chat/completions": Endpoint(ChatRequest, chat.params_of, chat.prepare),
    # A job's answers are in its results; kept in memory, too, they would push out those that people go on from.
    "/v1/responses": Endpoint(
        ResponseRequest,
        responses.params_of,
        lambda body, state: responses.prepare(body.model_copy(update={"store": False}), state),
    ),
}


@dataclass(frozen=True, slots=True)
class Checked:
    """What a body that can run asks for."""

    model: str
    answers: int
    ignored: list[str]


def parse(form: type[Body], given: object) -> Any:
    """A body as its model. Raises ApiError with the field."""
    try:
        return form.model_validate(given)
    except ValidationError as error:
        told = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False, include_context=False)]
        raise as_field_error(RequestValidationError(told)) from None


def check(state: ServerState, endpoint: str, given: dict[str, Any]) -> Checked:
    """Everything about a request that can be said without running it or tokenizing its prompt.

    Raises:
        ApiError: with the field.
    """
    for name in ("stream", "background", "previous_response_id"):
        if given.get(name):
            raise ApiError(400, f"{name} is not supported in a job; leave it out", param=name)
    try:
        target = ENDPOINTS[endpoint]
        body = parse(target.form, given)
        params = target.params_of(body, state)
    except SashError as error:
        raise as_api_error(error) from None
    return Checked(state.check_model(body.model), target.count(body) * params.n, body.ignored({}))


async def execute(state: ServerState, pending: Pending) -> tuple[int, bytes]:
    """Status and body that the endpoint would have answered with.

    Raises:
        OverloadedError, EngineDeadError, NotReadyError: the request may come again.
    """
    target = ENDPOINTS[pending.endpoint]
    if not state.engine.alive:
        raise NotReadyError
    try:
        body = parse(target.form, msgspec.json.decode(pending.body))
        return 200, await whole_answer(state, await target.prepare(body, state))
    except (OverloadedError, EngineDeadError):
        raise
    except SashError as error:
        told = as_api_error(error)
        if told.status == 503:
            raise NotReadyError from None
        return told.status, error_bytes(told)
