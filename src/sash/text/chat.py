"""Chat templates: messages to the text, and the ids, that a model was trained on.

Templates are code from a model's files, so they run in jinja's immutable sandbox. Their helpers (``raise_exception``,
``strftime_now``, ``tojson``, loop controls, ``generation`` blocks) are those of Hugging Face's chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sash.spec.errors import ModelError, RequestError
from sash.spec.sampling import SamplingParams
from sash.text.base import Tokenizer

Message = Mapping[str, Any]
# For base models, which bring none; and where an answer to it ends, since such a model would write both sides on.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN_STOPS = ("\nuser:", "\nassistant:")


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
    """Ids of a rendered conversation: its control tokens parsed, with one BOS where the model has one.

    Takes the options of ``render_chat`` and raises its errors.
    """
    return tokenizer.encode(render_chat(tokenizer, messages, **options), parse_special=True)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Render a conversation.

    Args:
        tokenizer: has the model's template and the texts of BOS and EOS.
        messages: role and content each; content is text or a list of text parts.
        template: jinja source that replaces the model's own.
        add_generation_prompt: end with the start of an answer.
        variables: more names for the template, such as ``tools``.

    Raises:
        ModelError: no template, or one that isn't valid jinja.
        RequestError: messages that the template refuses or can't render.
    """
    source = template if template is not None else tokenizer.chat_template
    if not source:
        raise ModelError(
            "the model has no chat template: give LLM.chat_prompt one (sash.text.chat.PLAIN_TEMPLATE is for base "
            "models), or use LLM.generate"
        )
    compiled = check_template(source)
    names = {
        "messages": [_plain(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": _token_text(tokenizer, tokenizer.bos_token_id),
        "eos_token": _token_text(tokenizer, tokenizer.eos_token_id),
    }
    try:
        return compiled.render(names | variables)
    except Exception as error:  # a template is code: it may raise anything
        raise RequestError(f"messages don't fit the model's chat template: {error}") from error


def end_turns(params: SamplingParams, template: str) -> SamplingParams:
    """``params`` of an answer to a conversation in ``template``; in the plain one it ends where a turn would begin.

    Not where ends are to be ignored or shown, or where a structure has its own.
    """
    own = params.ignore_eos or params.include_stop_str_in_output or params.structured_outputs is not None
    if template != PLAIN_TEMPLATE or own:
        return params
    return replace(params, stop=(*params.stop, *PLAIN_STOPS))


def check_template(source: str) -> jinja2.Template:
    """The compiled template.

    Raises:
        ModelError: it isn't valid jinja.
    """
    try:
        return _compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is not valid jinja (line {error.lineno}: {error}); pass another with "
            f"--chat-template FILE (in Python: LLM.chat_prompt with chat_template)"
        ) from error


def _plain(message: Message) -> dict[str, Any]:
    """A message whose list of text parts is joined into one text."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(
            f"messages are mappings with a role (system, user or assistant) and content each, such as "
            f'{{"role": "user", "content": "Hello"}}; got {message!r}'
        )
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    if not all(isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
        raise RequestError('message content must be text or a list of {"type": "text", "text": …} parts')
    return {**message, "content": "".join(part["text"] for part in content)}


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


class _GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}`` marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration isn't a ClassVar

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
