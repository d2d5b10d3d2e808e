"""StructuredOutputs: the form that an answer must have. Names follow vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sash.spec.errors import RequestError

# Bytes of a schema, expression, grammar or list of choices.
MAX_BYTES = 1 << 18
# A model without the sense to stop would write white space for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of the first five says what an answer must be, from its first token to its end.

    Args:
        json: text that fits this JSON schema, given as a mapping or as JSON.
        json_object: any JSON object.
        regex: text that a regular expression matches as a whole (syntax of Rust's regex crate: no look-around,
            no back-references).
        choice: one of these texts.
        grammar: text that a context-free grammar derives, in Lark's form or as GBNF.
        disable_any_whitespace: JSON without white space between its parts.
        lenient: a schema's keywords that can't be enforced are ignored instead of refused.
        origin: what errors call it; not a user's to say.

    Raises:
        RequestError: none or several are given, or one is of another type, empty or longer than 256 KiB. What can only
            be found by compiling (an unknown keyword of a schema, say) is found when the request is added.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    lenient: bool = False
    origin: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace", "lenient"):
            if not isinstance(getattr(self, name), bool):
                raise self._wrong(name, "True or False", getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"{self.origin} must be exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", self._schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices(self.choice))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise self._wrong(name, "a text that isn't empty", text)
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise self._wrong(self.kind, "valid Unicode", "lone surrogates") from None
        if size > MAX_BYTES:
            raise RequestError(f"{self.origin} {self.kind} has {size} bytes; at most {MAX_BYTES} are compiled")

    def _wrong(self, name: str, want: str, value: object) -> RequestError:
        return RequestError(f"{self.origin} {name} must be {want}, got {value!r:.200}")

    def _schema(self, value: object) -> str:
        """A schema as JSON text, its properties in the order given."""
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"{self.origin} json must be a JSON schema, which this isn't: {error}") from error
        if not isinstance(schema, Mapping):
            raise self._wrong("json", "a JSON schema: a mapping, or JSON of one", value)
        return text

    def _choices(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence) or not value:
            raise self._wrong("choice", "a list of texts that isn't empty", value)
        if not all(isinstance(item, str) for item in value):
            raise self._wrong("choice", "a list of texts", value)
        return tuple(value)

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """What is given: JSON for a schema and for choices, nothing for json_object."""
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        return "" if self.json_object else str(getattr(self, self.kind))


def structured_from(value: object) -> StructuredOutputs | None:
    """``SamplingParams.structured_outputs`` as it may be given: an object, a mapping of its fields, or None.

    Raises:
        RequestError: it is none of these, or has a field that isn't known.
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"structured_outputs must be StructuredOutputs or a mapping of its fields, got {value!r}")
    known = [name for name in StructuredOutputs.__dataclass_fields__ if name != "origin"]
    unknown = [str(name) for name in value if name not in known]
    if unknown:
        raise RequestError(f"structured_outputs has no field {unknown[0]}; use {', '.join(known)}")
    return StructuredOutputs(**{name: given for name, given in value.items() if given is not None})
