"""Names that look dead to vulture and are not; each group says who uses them. Reviewed when it grows."""

from __future__ import annotations

from typing import Any

_: Any = None

# Option sets of the command line: their fields are read by name (dataclasses.fields).
_.deterministic
_.request_timeout_s
_.debug
_.include_stop_str_in_output
_.ignore_eos
_.skip_special_tokens

# Attributes of tokenizers' objects that its library reads; jinja reads an extension's.
_.encode_special_tokens
_.pre_tokenizer
_.post_processor
_.ignore_merges
_.tags
_.parse

# transformers reads it from a config.
_._attn_implementation

# typer reads it from an option when it writes help.
_.metavar
