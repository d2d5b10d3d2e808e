"""From bodies to token ids: texts, conversations, and what is cut off; long ones in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from sash.server.errors import ApiError
from sash.server.protocol.chat import ChatMessage, TemplateBody
from sash.server.state import ServerState
from sash.server.tools.formats import format_of
from sash.server.tools.prompt import with_tools
from sash.server.tools.toolbox import Toolbox
from sash.spec.errors import ModelError, RequestError
from sash.text.base import Tokenizer
from sash.text.chat import PLAIN_TEMPLATE, render_chat

# Texts of so many characters together are worked on on the loop: a thread would take longer to start.
_SHORT = 2000
# The names by which render_chat takes its own arguments.
_RESERVED = frozenset({"tokenizer", "messages", "template", "add_generation_prompt"})
# Stands behind the message that is to be continued while the template renders it.
_END = "\ue0ff\ue0fe\ue0ff"
T = TypeVar("T")
# Templates of requests that are rendered at a time.
_TEMPLATES = threading.BoundedSemaphore(4)


def tokenizer_of(state: ServerState, param: str) -> Tokenizer:
    """The tokenizer. Raises ApiError where there is none."""
    if state.engine.tokenizer is None:
        raise ApiError(400, f"{param}: this server has no tokenizer; give a prompt of token ids", param=param)
    return state.engine.tokenizer


async def encode_texts(
    state: ServerState, texts: Sequence[str], *, add_bos: bool, param: str, empty: bool = False
) -> list[list[int]]:
    """Token ids of each text, names of control tokens being these; ``empty`` ones may have none.

    Raises:
        ApiError: no tokenizer, or a text without a token.
    """
    tokenizer = tokenizer_of(state, param)

    def work() -> list[list[int]]:
        return [tokenizer.encode(text, add_bos=add_bos, parse_special=True) for text in texts]

    encoded = await aside(sum(map(len, texts)), work)
    if not empty and not all(encoded):
        raise ApiError(400, f"{param} is empty; give some text or token ids", param=param)
    return encoded


async def encode_messages(
    state: ServerState, given: Sequence[ChatMessage], how: TemplateBody, toolbox: Toolbox | None = None
) -> list[int]:
    """Token ids of a conversation in the model's form, with the tools that it may use.

    Raises:
        ApiError: a template that may not be used, or messages that it refuses.
    """
    tokenizer = tokenizer_of(state, "messages")
    template = template_of(state, how.chat_template)
    form = format_of(template, state.settings.tool_call_parser)
    messages = [_for_template(message, template) for message in given]
    messages, variables = with_tools(messages, template, form, toolbox)
    size = len(msgspec.json.encode((messages, variables, how.chat_template_kwargs)))

    def work() -> list[int]:
        text = _render(tokenizer, template, how, messages, variables)
        return tokenizer.encode(text, add_bos=how.add_special_tokens is not False, parse_special=True)

    try:
        ids = await (aside(size, work) if how.chat_template is None else _apart(work))
    except (RequestError, ModelError) as error:
        raise ApiError(400, str(error), param="messages") from error
    if not ids:
        raise ApiError(400, "messages render to an empty prompt", param="messages")
    return ids


async def aside(size: int, work: Callable[[], T]) -> T:
    """Do work for so many characters, in a thread when they are many."""
    return work() if size <= _SHORT else await asyncio.to_thread(work)


async def _apart(work: Callable[[], T]) -> T:
    """Do the work of a request's own template, which may never end: in a thread that nobody waits for at the end, and
    of which there are few. Raises ApiError where all are taken."""
    if not _TEMPLATES.acquire(blocking=False):
        told = "as many templates of requests as may be are being rendered; try again, or use the server's template"
        raise ApiError(503, told, param="chat_template", code="templates_busy", headers={"Retry-After": "5"})
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():  # who asked is gone
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        finally:
            _TEMPLATES.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="template").start()
    return cast(T, await future)


def fit(state: ServerState, ids: list[int], *, keep: int | None, max_tokens: int | None, param: str) -> list[int]:
    """A prompt as it enters the engine.

    Args:
        state: knows the context's length.
        ids: of the prompt.
        keep: only so many tokens of its end, -1: as many as leave room for ``max_tokens``, None: all.
        max_tokens: of the answer; 0 asks for none.
        param: the prompt's field.

    Raises:
        ApiError: nothing would stay, or what stays is longer than the context.
    """
    info = state.engine.info
    longest = info.max_model_len if info is not None else len(ids) + 1
    if keep is not None:
        kept = longest - max(max_tokens or 1, 1) if keep < 0 else keep
        if kept < 1:
            raise ApiError(400, "truncate_prompt_tokens leaves nothing of the prompt", param="truncate_prompt_tokens")
        ids = ids[-kept:]
    if len(ids) + (max_tokens != 0) > longest:
        raise ApiError(
            400,
            f"{param}: the maximum context length is {longest} tokens and the prompt has {len(ids)}: shorten it to "
            f"{longest - 1}, or cut it with truncate_prompt_tokens",
            param=param,
            code="context_length_exceeded",
        )
    return ids


def template_of(state: ServerState, requested: str | None = None) -> str:
    """The jinja source of conversations; ``requested`` is a body's own. Raises ApiError where that may not be used."""
    if requested is not None:
        if not state.settings.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template is not taken from requests here; start the server with --trust-request-chat-template",
                param="chat_template",
            )
        return requested
    own = None if state.engine.tokenizer is None else state.engine.tokenizer.chat_template
    return state.chat_template or own or PLAIN_TEMPLATE


def _for_template(message: ChatMessage, template: str) -> dict[str, Any]:
    """A message as a template expects it: with a content, and with a role from before there were developers."""
    out = message.model_dump(exclude_none=True)
    out.setdefault("content", "")
    if out["role"] == "developer" and "developer" not in template:
        out["role"] = "system"
    return out


def _render(
    tokenizer: Tokenizer, template: str, how: TemplateBody, messages: list[dict[str, Any]], own: dict[str, Any]
) -> str:
    variables = own | (how.chat_template_kwargs or {})
    if taken := sorted(_RESERVED & variables.keys()):
        raise ApiError(400, f"chat_template_kwargs must not set {taken[0]}", param="chat_template_kwargs")
    going_on = bool(how.continue_final_message)
    start = not going_on if how.add_generation_prompt is None else how.add_generation_prompt
    if not going_on:
        return render_chat(tokenizer, messages, template=template, add_generation_prompt=start, **variables)
    if start:
        told = "continue_final_message and add_generation_prompt exclude each other; set one of them"
        raise ApiError(400, told, param="continue_final_message")
    last = messages[-1]
    if not isinstance(last.get("content"), str):
        told = "continue_final_message needs a last message whose content is a text"
        raise ApiError(400, told, param="continue_final_message")
    marked = [*messages[:-1], {**last, "content": last["content"] + _END}]
    text = render_chat(tokenizer, marked, template=template, add_generation_prompt=False, **variables)
    before, found, _ = text.rpartition(_END)
    if not found:
        raise ApiError(400, "the chat template leaves the last message out", param="continue_final_message")
    return before
