"""GGUF metadata to ModelSpec.

Keys: github.com/ggml-org/ggml, docs/gguf.md, and the defaults llama.cpp applies where a file says nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sash.spec.errors import ModelError
from sash.spec.ggml import GgmlType, TokenType
from sash.spec.gguf import GgufHeader
from sash.spec.model import (
    MAX_LAYERS,
    Activation,
    BlockKind,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    QkNorm,
    RopeKind,
    RopeSpec,
)
from sash.spec.span import Span


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's name implies and its file doesn't say.

    ``period`` n: layer i has the file's window when i mod n < n - 1; 0: all have it; None: the file must say which.
    ``window``: where the file has no such key. ``local_rope``: window layers have a rope base of their own.
    ``wide_layers``: with that many layers, attention scales by hidden size / heads (27B) and not by head size.
    """

    period: int | None = None
    window: int = 0
    activation: Activation = Activation.SILU
    block: BlockKind = BlockKind.PRE
    qk_norm: QkNorm = QkNorm.NONE
    scaled_embeddings: bool = False
    rope_base: float = 10000.0
    local_rope: bool = False
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    wide_layers: int = 0


_GEMMA: dict[str, Any] = {
    "activation": Activation.GELU_TANH,
    "block": BlockKind.SANDWICH,
    "scaled_embeddings": True,
}
FAMILIES: dict[str, Family] = {
    "llama": Family(period=0),  # Mistral 7B v0.1 has the key and no pattern: its window is on every layer
    "gemma2": Family(period=2, window=4096, attn_softcap=50.0, final_softcap=30.0, wide_layers=46, **_GEMMA),
    "gemma3": Family(period=6, qk_norm=QkNorm.HEAD, rope_base=1e6, local_rope=True, wide_layers=62, **_GEMMA),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=QkNorm.HEAD),
    "phi3": Family(period=0),
}
# Names of tokens that end a turn or a text; they count only where the file marks them as control tokens.
END_TOKENS = (
    "<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<|return|>", "<|call|>", "<EOT>", "<eos>", "</s>",
)  # fmt: skip


def spec_from_gguf(header: GgufHeader) -> ModelSpec:
    """Translate a header.

    Raises:
        ModelError: an architecture sash has no decoder for, a missing or impossible value, or a window that can't
            be honoured; the message names the key.
    """
    return _Translation(header).spec()


class _Translation:
    def __init__(self, header: GgufHeader) -> None:
        arch = header.get("general.architecture")
        if arch not in FAMILIES:
            raise ModelError(
                f"{header.path}: general.architecture is {arch!r}; GGUF files of {', '.join(FAMILIES)} are supported "
                f"(Mistral and Mixtral files say llama)"
            )
        if header.get("split.count", 1) > 1:
            raise ModelError(
                f"{header.path} is one part of split.count = {header['split.count']}; join the parts with "
                f"llama-gguf-split --merge and give the joined file"
            )
        self.header, self.arch, self.family = header, arch, FAMILIES[arch]
        self.num_layers = self.count("block_count")
        if self.num_layers > MAX_LAYERS:
            raise self.error("block_count", f"must be 1 to {MAX_LAYERS}, is {self.num_layers}")
        self.hidden = self.count("embedding_length")
        self.context = self.count("context_length")
        self.notes: list[str] = []

    def error(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self.header.path}: {self.arch}.{key} {why}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.get(f"{self.arch}.{key}", default)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            state = "missing" if value is None else repr(value)
            raise self.error(key, f"must be a whole number of {least} or more, is {state}")
        return value

    def number(self, key: str, default: float, *, least: float = -math.inf) -> float:
        value = self.get(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least:
            bound = "" if least == -math.inf else f" of {least:g} or more"
            raise self.error(key, f"must be a number{bound}, is {value!r}")
        return float(value)

    def per_layer(self, key: str, default: int | None = None) -> list[int]:
        """One count per layer, from a number or an array."""
        value = self.get(key, default)
        values = value if isinstance(value, list) else [value] * self.num_layers
        if len(values) != self.num_layers or not all(type(v) is int and v > 0 for v in values):
            raise self.error(
                key, f"must be a number of 1 or more or one for each of {self.num_layers} layers, is {value!r}"
            )
        return values

    def spec(self) -> ModelSpec:
        tensors = self.header.tensors
        if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
            raise ModelError(f"{self.header.path}: token_embd.weight [vocabulary, {self.hidden}] is missing")
        vocab = tensors["token_embd.weight"].shape[0]
        layers = self.layers()
        return ModelSpec(
            architecture=self.arch,
            vocab_size=vocab,
            hidden_size=self.hidden,
            layers=layers,
            max_position=self.context,
            norm_eps=self.number("attention.layer_norm_rms_epsilon", 1e-6, least=0.0),
            block=self.family.block,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            embed_scale=math.sqrt(self.hidden) if self.family.scaled_embeddings else 1.0,
            logit_scale=self.number("logit_scale", 1.0),
            final_softcap=self.number("final_logit_softcapping", self.family.final_softcap, least=0.0),
            tied_embeddings="output.weight" not in tensors,
            bos_token_id=self.header.get("tokenizer.ggml.bos_token_id"),
            stop_token_ids=stop_tokens(self.header, vocab),
            notes=tuple(self.notes),
        )

    def layers(self) -> tuple[LayerSpec, ...]:
        heads, kv_heads = self.per_layer("attention.head_count"), self.kv_heads()
        head_dim = self.count("attention.key_length", self.hidden // heads[0])
        inner = self.per_layer("feed_forward_length")
        scale_dim = self.hidden / heads[0] if self.num_layers == self.family.wide_layers else head_dim
        experts = self.count("expert_count", 0, least=0)
        spans = self.spans()
        ropes = {True: self.rope(head_dim, local=True), False: self.rope(head_dim, local=False)}
        return tuple(
            LayerSpec(
                span=span,
                span_source=source,
                num_heads=heads[i],
                num_kv_heads=kv_heads[i],
                head_dim=head_dim,
                v_head_dim=self.count("attention.value_length", head_dim),
                scale=scale_dim**-0.5,
                rope=ropes[span.bounded and self.family.local_rope],
                mlp=MlpSpec(
                    inner[i],
                    self.family.activation,
                    num_experts=experts,
                    experts_per_token=self.count("expert_used_count") if experts else 0,
                ),
                softcap=self.number("attn_logit_softcapping", self.family.attn_softcap, least=0.0),
                qk_norm=self.family.qk_norm,
            )
            for i, (span, source) in enumerate(spans)
        )

    def kv_heads(self) -> list[int]:
        heads = self.per_layer("attention.head_count")
        if self.get("attention.head_count_kv") is None:
            return heads
        kv_heads = self.per_layer("attention.head_count_kv")
        for h, k in zip(heads, kv_heads, strict=True):
            if h % k:
                raise self.error("attention.head_count_kv", f"must divide the number of heads {h}, is {k}")
        return kv_heads

    # ------------------------------------------------------------------ windows

    def spans(self) -> list[tuple[Span, str]]:
        """Span of each layer and the key or the rule that decided it."""
        self.refuse_unknown_windows()
        key, pattern_key = "attention.sliding_window", "attention.sliding_window_pattern"
        window, default_rule = self.get(key), ""
        if window is None and self.family.window:
            window, default_rule = self.family.window, f" ({self.arch} architecture default: {self.family.window})"
        if not window:
            if self.family.local_rope:
                self.notes.append(f"no {self.arch}.{key} in the file: every layer is full")
            return [(Span.full(), f"no {self.arch}.{key}")] * self.num_layers
        if type(window) is not int or window < 1:
            raise self.error(key, f"must be a whole number of 1 or more (or 0: no window), is {window!r}")
        local, rule = self.local_layers(window, self.get(pattern_key))
        name = f"{self.arch}.{key}{default_rule}"
        return [
            (Span.sliding(window), f"{name}, {rule}" if rule else name) if is_local else (Span.full(), rule)
            for is_local in local
        ]

    def local_layers(self, window: int, pattern: Any) -> tuple[list[bool], str]:
        """Which layers have the window, and the rule that says so ("": the window's own key)."""
        key = "attention.sliding_window_pattern"
        if isinstance(pattern, list):
            if len(pattern) != self.num_layers:
                raise self.error(key, f"must have one entry for each of {self.num_layers} layers, has {len(pattern)}")
            return [bool(p) for p in pattern], f"{self.arch}.{key}"
        if type(pattern) is int and pattern >= 0:
            return self.periodic(pattern), f"{self.arch}.{key} = {pattern}"
        if pattern is not None:
            raise self.error(key, f"must be a period or one boolean per layer, is {pattern!r}")
        period = self.family.period
        if period == 0:
            return self.periodic(0), ""
        if period is not None:
            ordinal = {2: "2nd"}.get(period, f"{period}th")
            return self.periodic(period), f"{self.arch} architecture default: every {ordinal} layer full"
        if window >= self.context:
            return [False] * self.num_layers, f"{self.arch}.attention.sliding_window >= {self.arch}.context_length"
        raise self.error(
            "attention.sliding_window",
            f"is {window}, but {self.arch}.{key} doesn't say which layers have that window; add it (a period or one "
            f"boolean per layer), or set the window to 0 for full attention",
        )

    def periodic(self, period: int) -> list[bool]:
        """Layer i is local when i mod n < n - 1; 0: all are."""
        return [period == 0 or i % period < period - 1 for i in range(self.num_layers)]

    def refuse_unknown_windows(self) -> None:
        known = {f"{self.arch}.attention.sliding_window", f"{self.arch}.attention.sliding_window_pattern"}
        for key in self.header:
            odd = key.startswith(f"{self.arch}.") and ("window" in key or "chunk" in key or "local" in key)
            if odd and key not in known and self.header[key]:
                raise ModelError(
                    f"{self.header.path}: {key} describes a window that sash can't honour for {self.arch} files; "
                    f"attention.sliding_window and attention.sliding_window_pattern are supported"
                )

    # ------------------------------------------------------------------ rope

    def rope(self, head_dim: int, *, local: bool) -> RopeSpec:
        """Rope of the global layers, or of the local ones where the family has two (scaling is global only)."""
        rotary = self.count("rope.dimension_count", head_dim)
        if rotary > head_dim or rotary % 2:
            raise self.error("rope.dimension_count", f"must be even and at most the head's {head_dim}, is {rotary}")
        base = self.number("rope.freq_base", self.family.rope_base, least=1.0)
        if local and self.family.local_rope:
            return RopeSpec(rotary, self.number("rope.freq_base_swa", 10000.0, least=1.0), max_position=self.context)
        factors = self.factor_tensors(rotary // 2)
        kind = self.get("rope.scaling.type", "none")
        factor = (
            self.number("rope.scaling.factor", 0.0, least=0.0)
            or self.number("rope.scale_linear", 0.0, least=0.0)
            or 1.0
        )
        original = self.count("rope.scaling.original_context_length", 0, least=0)
        extra = self.number("rope.scaling.attn_factor", 1.0)
        if factors:
            short, long = factors
            original = original or self.context
            attention = self.longrope_attention(original, extra) if short != long else extra
            return RopeSpec(
                rotary, base, RopeKind.LONGROPE, original_max_position=original, max_position=self.context,
                attention_factor=attention, short_factor=short, long_factor=long,
            )  # fmt: skip
        if kind == "yarn":
            original = original or round(self.context / factor)
            if original < 2:
                raise self.error("rope.scaling.factor", f"must be below the context of {self.context}, is {factor:g}")
            return RopeSpec(
                rotary, base, RopeKind.YARN, factor=factor, max_position=self.context,
                original_max_position=original,
                attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
                beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0, least=1e-6),
                beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0, least=1e-6),
            )  # fmt: skip
        if kind == "linear" or (kind == "none" and self.get("rope.scale_linear")):
            return RopeSpec(rotary, base, RopeKind.LINEAR, factor=factor, max_position=self.context)
        if kind != "none":
            raise self.error("rope.scaling.type", f"is {kind!r}; none, linear, yarn and longrope (with tables) work")
        return RopeSpec(rotary, base, max_position=self.context)

    def longrope_attention(self, original: int, stored: float) -> float:
        """LongRoPE's scale of cos and sin (arXiv 2402.13753): the file's, or its formula."""
        stretch = self.context / original
        if stored != 1.0 or stretch <= 1.0:
            return stored
        return math.sqrt(1.0 + math.log(stretch) / math.log(original))

    def factor_tensors(self, half: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Divisors of the rope frequencies stored as tensors: Llama 3.1's one table, Phi-3's short and long."""
        tables = []
        for name in ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"):
            tensor = self.header.tensors.get(name) or self.header.tensors.get(f"blk.0.{name}")
            if tensor is None:
                continue
            if tensor.type is not GgmlType.F32 or tensor.shape != (half,):
                raise ModelError(
                    f"{self.header.path}: {tensor.name} must be {half} F32 numbers, "
                    f"is {list(tensor.shape)} {tensor.type.name}"
                )
            tables.append(struct.unpack(f"<{half}f", self.header.tensor_bytes(tensor.name)))
        return (tables[0], tables[-1]) if tables else None


def stop_tokens(header: GgufHeader, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: the file's eos, eot and eom, and control tokens whose name says so."""
    found = [header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    types: Sequence[int] = header.get("tokenizer.ggml.token_type") or ()
    for name in END_TOKENS:
        token = header.find("tokenizer.ggml.tokens", name)
        if token is not None and token < len(types) and types[token] == TokenType.CONTROL:
            found.append(token)
    return tuple(sorted({t for t in found if isinstance(t, int) and 0 <= t < vocab_size}))
