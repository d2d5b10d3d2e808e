"""A small SentencePiece vocabulary in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.gguf_files import write_gguf

SPM_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{b:02X}>" for b in range(256)),
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581a",
    "  ",
    "<x>",
]
SPM_TYPES = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4, 4]
SPACE, A, B, AB, SPACE_A, TWO_SPACES = (SPM_TOKENS.index(t) for t in ("\u2581", "a", "b", "ab", "\u2581a", "  "))


def spm_file(tmp_path: Path, keys: Mapping[str, Any] | None = None) -> Path:
    scores = [0.0 if kind == 6 else -float(i) for i, kind in enumerate(SPM_TYPES)]
    base = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM_TOKENS,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(SPM_TYPES, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return write_gguf(tmp_path / "spm.gguf", "llama", base | dict(keys or {}))
