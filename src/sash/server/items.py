"""Items of the Responses API as the messages that a chat template takes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from sash.server.errors import ApiError
from sash.server.protocol.chat import ChatMessage

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
Item = dict[str, Any]


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """An input as items with ids, a text as a user's message.

    Raises:
        ApiError: an id that isn't a text.
    """
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    for i, item in enumerate(given):
        if not isinstance(item.get("id"), str | None):
            raise _wrong(f"input.{i}", "id must be a text", "id")
    return [{"type": "message", **item, "id": item.get("id") or f"msg_{uuid.uuid4().hex}"} for item in given]


def messages_of(items: Sequence[Item], instructions: str | None) -> list[ChatMessage]:
    """Messages of items. What a system says at the start is one message: many templates know no second.

    Raises:
        ApiError: an item that isn't text.
    """
    out: list[Item] = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(items):
        message = _message(item, f"input.{i}")
        if message is None:
            continue
        last = out[-1] if out else None
        if last is not None and _is_start(out) and message["role"] in ("system", "developer"):
            last["content"] = f"{last['content']}\n\n{message['content']}"
        elif last is not None and "tool_calls" in message and "tool_calls" in last:
            last["tool_calls"] += message["tool_calls"]
        else:
            out.append(message)
    return [ChatMessage.model_validate(message) for message in out]


def _is_start(messages: list[Item]) -> bool:
    return len(messages) == 1 and messages[0]["role"] in ("system", "developer")


def _message(item: Item, where: str) -> Item | None:
    """One item as a message; None for what says nothing to the model."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise _wrong(where, f"role must be one of {', '.join(_ROLES)}", "role")
        return {"role": role, "content": _text(item.get("content"), where)}
    if kind == "function_call":
        call = {name: item.get(name) for name in ("call_id", "name", "arguments")}
        for name, value in call.items():
            if not isinstance(value, str):
                raise _wrong(where, f"{name} must be a text", name)
        function = {"name": call["name"], "arguments": call["arguments"]}
        calls = [{"id": call["call_id"], "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else _text(output, where, "output")
        return {"role": "tool", "content": content, "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        return None
    raise _wrong(where, f"items of type {str(kind)[:40]!r} are not supported; text only", "type")


def _text(content: object, where: str, field: str = "content") -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, f"{field} must be a text or a list of parts", field)
    texts: list[str] = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise _wrong(where, f"parts of type {str(kind)[:40]!r} are not supported; input_text is", f"{field}.{j}")
        if not isinstance(part.get("text"), str):
            raise _wrong(where, "text must be a text", f"{field}.{j}.text")
        texts.append(part["text"])
    return "\n".join(texts)


def _wrong(where: str, told: str, field: str) -> ApiError:
    return ApiError(400, f"{where}: {told}", param=f"{where}.{field}")
