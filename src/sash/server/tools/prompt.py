"""Tools in conversations: as the model's template wants them, or in a plain form where it knows of none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sash.server.errors import ApiError
from sash.server.protocol.tools import too_deep
from sash.server.tools.formats import ToolFormat
from sash.server.tools.toolbox import Toolbox

Message = dict[str, Any]
_TOOLS, _CALLS = re.compile(r"\btools\b"), re.compile(r"\btool_calls\b")
_NO_SYSTEM = re.compile(r"system role (is )?not supported", re.IGNORECASE)
INTRODUCTION = (
    "You can call functions. Each line describes one, with a JSON schema of its arguments:\n"
    "{tools}\n"
    "To call a function, answer with nothing but the call, in this form:\n"
    "{example}\n"
    "What it returns stands between <tool_response> and </tool_response> in the next message."
)


def with_tools(
    messages: Sequence[Message], template: str, form: ToolFormat, toolbox: Toolbox | None
) -> tuple[list[Message], dict[str, Any]]:
    """Messages and variables for a template, so that the model learns of tools, calls and their results.

    Raises:
        ApiError: a call in a message that isn't one.
    """
    told = [_read_calls(message, place) for place, message in enumerate(messages)]
    if not _TOOLS.search(template) and not _CALLS.search(template):
        told = _plain(told, form)
    if toolbox is None:
        return told, {}
    if _TOOLS.search(template):
        return told, {"tools": toolbox.described}
    return _introduced(told, template, _introduction(toolbox)), {}


def _plain(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """For a template that knows neither calls nor results."""
    plain: list[Message] = []
    for message in messages:
        _append(plain, _without_calls(message, form))
    return plain


def _read_calls(message: Message, place: int) -> Message:
    """The message with its calls' arguments as objects, which templates expect; clients send them as JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    where = f"messages.{place}.tool_calls"
    if not isinstance(calls, list):
        raise ApiError(400, f"{where} must be a list", param=where)
    return {**message, "tool_calls": [_read_call(call, where) for call in calls]}


def _read_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        told = f'{where} must hold {{"id": …, "type": "function", "function": {{"name": …, "arguments": …}}}}'
        raise ApiError(400, told, param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ApiError(
                400, f"{where}: the arguments of {function['name'][:100]} are no JSON", param=where
            ) from None
    if too_deep(arguments):
        raise ApiError(400, f"{where}: the arguments of {function['name'][:100]} are nested too deeply", param=where)
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _without_calls(message: Message, form: ToolFormat) -> Message:
    """Calls as the text that they were, results as a message of the user."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = form.write(
        [(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)) for call in calls]
    )
    text = _text(message)
    return {"role": message["role"], "content": f"{text}\n{written}" if text else written}


def _append(messages: list[Message], message: Message) -> None:
    """Results that follow each other are one message: many templates want roles to alternate."""
    last = messages[-1] if messages else None
    is_result = message["role"] == "user" and str(message.get("content")).startswith("<tool_response>")
    if last is not None and is_result and last["role"] == "user" and str(last["content"]).startswith("<tool_response>"):
        messages[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
    else:
        messages.append(message)


def _introduction(toolbox: Toolbox) -> str:
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in toolbox.described]
    example = toolbox.form.write([("NAME", "{…}")])
    return INTRODUCTION.format(tools="\n".join(functions), example=example)


def _introduced(messages: list[Message], template: str, text: str) -> list[Message]:
    """Before everything else: in the system message, or in the first one where there can be none."""
    first = messages[0]
    if first["role"] in ("system", "developer") or _NO_SYSTEM.search(template):
        return [{**first, "content": f"{text}\n\n{_text(first)}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
