"""The tools of one request: what the model is told of them, what its answer must be, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sash.server.errors import ApiError
from sash.server.protocol.tools import NamedTool, Tool, ToolBody
from sash.server.tools.formats import MAX_CALLS, ToolFormat, control_texts
from sash.server.tools.parser import ToolParser
from sash.spec.structured import StructuredOutputs
from sash.text.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools that the model may call, at least one of them where ``required``, and how it writes that. ``controls`` are
    marks of the format that are control tokens, ``dropped`` other control tokens' texts, which are no part of answers
    once control tokens are shown."""

    tools: tuple[Tool, ...]
    form: ToolFormat
    required: bool
    most: int
    controls: dict[str, int]
    dropped: tuple[str, ...]

    @property
    def described(self) -> list[dict[str, Any]]:
        """The tools as the request gave them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def constraint(self, form: StructuredOutputs | None) -> StructuredOutputs | None:
        """The form that the whole answer must have: calls where they are required, else ``form`` or calls.

        Raises:
            ApiError: ``form`` can't be an alternative to calls.
            RequestError: the grammar is too large.
        """
        if self.required:
            return self._forced("")
        if form is None:
            return None
        if form.kind not in ("json", "json_object"):
            told = f"{form.origin} can't stand beside tools; leave out one of them, or set tool_choice to none"
            raise ApiError(400, told, param=form.origin)
        schema = json.loads(form.text or '{"type": "object"}')
        return self._forced(json.dumps({**schema, "x-guidance": {"lenient": form.lenient}}))

    def _forced(self, alternative: str) -> StructuredOutputs:
        specs = [tool.function for tool in self.tools]
        tools = {spec.name: (spec.parameters, bool(spec.strict)) for spec in specs}
        grammar = self.form.grammar(tools, self.most, self.controls)
        if alternative:
            grammar = grammar.replace("start:", "calls:", 1) + f"\nstart: calls | form\nform: %json {alternative}"
        return StructuredOutputs(grammar=grammar, origin="tools")

    def parser(self) -> ToolParser:
        """For one answer."""
        names = {tool.function.name for tool in self.tools}
        return ToolParser(self.form, names, self.dropped, forced=self.required)


def toolbox_of(body: ToolBody, form: ToolFormat, template: str, tokenizer: Tokenizer | None) -> Toolbox | None:
    """The tools of a body; None where there are none, or none may be called.

    Raises:
        ApiError: a name that is there twice, or a choice without its tool.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools must have different names", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    one = choice.function.name if isinstance(choice, NamedTool) else None
    if one is not None and one not in names:
        raise ApiError(400, f"tool_choice names {one[:100]!r}, which isn't among tools", param="tool_choice")
    chosen = [tool for tool in tools if one in (None, tool.function.name)]
    controls = control_texts(form, tokenizer)
    return Toolbox(
        tools=tuple(chosen if one else tools),
        form=form,
        required=choice == "required" or one is not None,
        most=1 if one is not None or body.parallel_tool_calls is False else MAX_CALLS,
        controls=controls,
        dropped=_others(tokenizer, template, controls) if controls else (),
    )


def _others(tokenizer: Tokenizer | None, template: str, controls: Sequence[str] | dict[str, int]) -> tuple[str, ...]:
    """Texts of the control tokens that a template uses, and of the one that ends answers."""
    if tokenizer is None:
        return ()
    found = set()
    for token in tokenizer.special_ids:
        text = tokenizer.token_bytes(token).decode(errors="replace")
        if text and text not in controls and (text in template or token == tokenizer.eos_token_id):
            found.add(text)
    return tuple(sorted(found))
