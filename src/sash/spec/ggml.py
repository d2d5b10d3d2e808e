"""Numbers in GGUF files: storage types of tensors with the sizes of their blocks, and types of tokens.

Source: github.com/ggml-org/ggml, ggml.h (numbers) and ggml-common.h (block layouts), docs/gguf.md (tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class GgmlType(IntEnum):
    """Storage types of tensors that occur in files, by their ggml number."""

    F32, F16, Q4_0, Q4_1 = 0, 1, 2, 3
    Q5_0, Q5_1, Q8_0, Q8_1 = 6, 7, 8, 9
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K = 10, 11, 12, 13, 14, 15
    IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS = 16, 17, 18, 19, 20, 21, 22, 23
    I8, I16, I32, I64, F64, IQ1_M, BF16 = 24, 25, 26, 27, 28, 29, 30
    TQ1_0, TQ2_0, MXFP4 = 34, 35, 39


class TokenType(IntEnum):
    """What a token is, in ``tokenizer.ggml.token_type``; SentencePiece numbers its pieces alike."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


# Type: elements of a block, bytes of a block.
BLOCKS: Mapping[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4), GgmlType.F16: (1, 2), GgmlType.BF16: (1, 2), GgmlType.F64: (1, 8),
    GgmlType.I8: (1, 1), GgmlType.I16: (1, 2), GgmlType.I32: (1, 4), GgmlType.I64: (1, 8),
    GgmlType.Q4_0: (32, 18), GgmlType.Q4_1: (32, 20), GgmlType.Q5_0: (32, 22), GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34), GgmlType.Q8_1: (32, 40), GgmlType.Q2_K: (256, 84), GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144), GgmlType.Q5_K: (256, 176), GgmlType.Q6_K: (256, 210), GgmlType.Q8_K: (256, 292),
    GgmlType.IQ2_XXS: (256, 66), GgmlType.IQ2_XS: (256, 74), GgmlType.IQ3_XXS: (256, 98), GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18), GgmlType.IQ3_S: (256, 110), GgmlType.IQ2_S: (256, 82), GgmlType.IQ4_XS: (256, 136),
    GgmlType.IQ1_M: (256, 56), GgmlType.TQ1_0: (256, 54), GgmlType.TQ2_0: (256, 66), GgmlType.MXFP4: (32, 17),
}  # fmt: skip
