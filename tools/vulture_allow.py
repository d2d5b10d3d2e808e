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
