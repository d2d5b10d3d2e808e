"""What a model is, as data: frozen, torch-free, one entry per layer.

Foreign descriptions (``config.json``, GGUF metadata) are translated into these once; the decoder,
the pools, the planner and the docs read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sash.spec.span import Span

# No model has more: a damaged description that says so would fill the memory before its weights are missed.
MAX_LAYERS = 10_000


class RopeKind(StrEnum):
    """Frequency schedules of rotary position embedding."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LONGROPE = "longrope"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one layer (arXiv 2104.09864; YaRN 2309.00071; LongRoPE 2402.13753).

    ``rotary_dim`` is the number of leading head dimensions that rotate. ``interleaved`` pairs
    dimension 2i with 2i + 1 (Cohere), else i with i + rotary_dim / 2. ``attention_factor`` scales
    cos and sin (None: the kind's own rule). ``truncate`` rounds YaRN's ramp to whole dimensions.
    """

    rotary_dim: int
    base: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class Activation(StrEnum):
    """Gate activations; ``clamped_swiglu`` is gpt-oss's (clamp at 7, alpha 1.702, up + 1)."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated MLP, dense (``num_experts`` 0) or a mixture of experts.

    The chosen experts' weights are a softmax over their own router logits: gpt-oss says so, and Mixtral's softmax
    over all experts, divided by its sum over the chosen ones, is the same.
    """

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    router_bias: bool = False


class QkNorm(StrEnum):
    """Norm of queries and keys before rope: none, per head (Gemma 3, Qwen3), over all heads (OLMo)."""

    NONE = "none"
    HEAD = "head"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. ``span_source`` names the config field that decided its span.

    ``scale`` multiplies the query-key products; ``softcap`` bounds them (c · tanh(x / c), after the
    scale, before the mask; 0: none); ``learned_sinks`` adds one logit per query head whose
    probability mass is dropped (gpt-oss). ``rope`` None is NoPE.
    """

    span: Span
    span_source: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    rope: RopeSpec | None
    mlp: MlpSpec
    softcap: float = 0.0
    learned_sinks: bool = False
    qk_norm: QkNorm = QkNorm.NONE


class NormKind(StrEnum):
    """RMS: x / rms(x) · w; RMS_PLUS_ONE: · (1 + w) as Gemma's files store it; LAYER: mean-free, no bias (Cohere)."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


class BlockKind(StrEnum):
    """Where a block's norms sit.

    pre: norm before attention and before the MLP (Llama). sandwich: before and after each
    (Gemma 2, 3). post: after each only (OLMo 3, EXAONE 4). parallel: one norm, attention and MLP
    side by side (Cohere).
    """

    PRE = "pre"
    SANDWICH = "sandwich"
    POST = "post"
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model. Sizes in elements, positions in tokens.

    ``embed_scale`` multiplies embeddings per token; ``logit_scale`` the logits; ``final_softcap``
    bounds them (0: none). ``max_position`` is the longest context the model was made for.
    ``stop_token_ids`` end a generation unless ``ignore_eos``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-6
    block: BlockKind = BlockKind.PRE
    qkv_bias: bool = False
    o_bias: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float = 0.0
    tied_embeddings: bool = True
    bos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def expected_weights(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical tensor names and shapes that a loader must deliver, no more and no fewer.

    Loaders translate a file's names to these; linear weights are [out, in]. Per layer ``i`` the
    prefix is ``layers.{i}.``. Norm weights are as the spec's ``norm`` kind wants them.
    """
    hidden = spec.hidden_size
    out: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden), "final_norm": (hidden,)}
    if not spec.tied_embeddings:
        out["head"] = (spec.vocab_size, hidden)
    for i, layer in enumerate(spec.layers):
        out.update({f"layers.{i}.{name}": shape for name, shape in _layer_weights(spec, layer).items()})
    return out


def _layer_weights(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    hidden, q_out = spec.hidden_size, layer.num_heads * layer.head_dim
    k_out, v_out = layer.num_kv_heads * layer.head_dim, layer.num_kv_heads * layer.v_head_dim
    out: dict[str, tuple[int, ...]] = {
        "q": (q_out, hidden),
        "k": (k_out, hidden),
        "v": (v_out, hidden),
        "o": (hidden, layer.num_heads * layer.v_head_dim),
    }
    if spec.block is not BlockKind.POST:
        out["attn_norm"] = (hidden,)
    if spec.block in (BlockKind.SANDWICH, BlockKind.POST):
        out |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
    if spec.block in (BlockKind.PRE, BlockKind.SANDWICH):
        out["mlp_norm"] = (hidden,)
    if spec.qkv_bias:
        out |= {"q_bias": (q_out,), "k_bias": (k_out,), "v_bias": (v_out,)}
    if spec.o_bias:
        out["o_bias"] = (hidden,)
    if layer.qk_norm is QkNorm.HEAD:
        out |= {"q_norm": (layer.head_dim,), "k_norm": (layer.head_dim,)}
    elif layer.qk_norm is QkNorm.FULL:
        out |= {"q_norm": (q_out,), "k_norm": (k_out,)}
    if layer.learned_sinks:
        out["sinks"] = (layer.num_heads,)
    return out | _mlp_weights(hidden, layer.mlp)


def _mlp_weights(hidden: int, mlp: MlpSpec) -> dict[str, tuple[int, ...]]:
    inner, experts = mlp.intermediate_size, mlp.num_experts
    if not experts:
        out: dict[str, tuple[int, ...]] = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        if mlp.bias:
            out |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
        return out
    out = {
        "router": (experts, hidden),
        "gate": (experts, inner, hidden),
        "up": (experts, inner, hidden),
        "down": (experts, hidden, inner),
    }
    if mlp.router_bias:
        out["router_bias"] = (experts,)
    if mlp.bias:
        out |= {"gate_bias": (experts, inner), "up_bias": (experts, inner), "down_bias": (experts, hidden)}
    return out
