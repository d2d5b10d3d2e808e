"""How families of models write tool calls. A new one is an entry of ``FORMATS``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sash.spec.structured import WHITESPACE
from sash.text.base import Tokenizer

# Calls in one answer that is forced to make some.
MAX_CALLS = 8
_EMPTY_SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    An answer's calls are ``start``, the calls joined by ``joint``, ``end``; a call is ``before``, a JSON object with
    ``name`` and the key ``arguments``, ``after``.

    Args:
        name: for --tool-call-parser.
        marks: of a chat template that is made for it.
        opens: what calls begin with.
        closes: what may stand behind calls and is no text.
        bare: an answer that begins with the object is a call, too.
        python: a call may also be a line of Python between ``opens`` and ``closes``.
        named: a call may also be its name, then ``[ARGS]``, then the arguments.
    """

    name: str
    marks: tuple[str, ...]
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    start: str = ""
    before: str = ""
    key: str = "arguments"
    after: str = ""
    joint: str = ""
    end: str = ""
    bare: bool = False
    python: bool = False
    named: bool = False

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """An answer that makes calls (name, JSON of the arguments)."""
        written = [f"{self._head(name)}{arguments}{self._tail()}" for name, arguments in calls]
        return self.start + self.joint.join(written) + self.end

    def _head(self, name: str) -> str:
        return f'{self.before}{{"name": {json.dumps(name)}, "{self.key}": '

    def _tail(self) -> str:
        return "}" + self.after

    def grammar(
        self, tools: Mapping[str, tuple[dict[str, object] | None, bool]], most: int, specials: Mapping[str, int]
    ) -> str:
        """A Lark grammar of answers that make one to ``most`` calls.

        Args:
            tools: schema of the arguments, and whether to insist on all of it, by name.
            most: calls.
            specials: texts that are control tokens, and their ids.
        """
        more = "" if most == 1 else f" ({_literal(self.joint, specials)} call){{0,{most - 1}}}"
        rules = [f"start: {_literal(self.start, specials)} call{more} {_literal(self.end, specials)}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, (name, (schema, strict)) in enumerate(tools.items()):
            head, tail = _literal(self._head(name), specials), _literal(self._tail(), specials)
            options = {"x-guidance": {"lenient": not strict, "whitespace_pattern": WHITESPACE}}
            rules.append(f"call_{i}: {head} arguments_{i} {tail}")
            rules.append(f"arguments_{i}: %json {json.dumps((schema or _EMPTY_SCHEMA) | options)}")
        return "\n".join(rules)


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """A text as Lark writes it; nothing for no text."""
    if not text:
        return ""
    if not specials:
        return json.dumps(text)
    pieces = re.split("(" + "|".join(map(re.escape, specials)) + ")", text)
    return " ".join(f"<[{specials[p]}]>" if p in specials else json.dumps(p) for p in pieces if p)


HERMES = ToolFormat(
    name="hermes",
    marks=("<tool_call>",),
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    before="<tool_call>\n",
    after="\n</tool_call>",
    joint="\n",
)
MISTRAL = ToolFormat(
    name="mistral",
    marks=("[TOOL_CALLS]",),
    opens=("[TOOL_CALLS]",),
    closes=(),
    start="[TOOL_CALLS][",
    joint=", ",
    end="]",
    named=True,
)
LLAMA3 = ToolFormat(
    name="llama3",
    marks=("<|python_tag|>", "Environment: ipython"),
    opens=("<|python_tag|>",),
    closes=(),
    key="parameters",
    joint="; ",
    bare=True,
)
GEMMA = ToolFormat(
    name="gemma",
    marks=("<start_of_turn>",),
    opens=("```tool_code", "```json", "<tool_call>"),
    closes=("```", "</tool_call>"),
    before="```tool_code\n",
    after="\n```",
    key="parameters",
    joint="\n",
    bare=True,
    python=True,
)
FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA3, GEMMA)}


def format_of(template: str, name: str = "auto") -> ToolFormat:
    """The format of that name; for auto the one that a chat template is made for, hermes where none shows."""
    if name != "auto":
        return FORMATS[name]
    return next((form for form in FORMATS.values() if any(mark in template for mark in form.marks)), HERMES)


def control_texts(form: ToolFormat, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Those of a format's marks that are control tokens of the model, with their ids."""
    if tokenizer is None:
        return {}
    found = {}
    for text in (*form.opens, *form.closes):
        ids = tokenizer.encode(text, add_bos=False, parse_special=True)
        if len(ids) == 1 and ids[0] in tokenizer.special_ids:
            found[text] = ids[0]
    return found
