"""The model families that config.json can name, as data: their block, norms, biases and defaults.

``defaults`` are what transformers assumes for a field that a config leaves out. A new family that
fits the decoder is one entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sash.spec.model import Activation, BlockKind, NormKind, QkNorm


@dataclass(frozen=True, slots=True)
class Family:
    """What a config.json of one family doesn't say.

    Attributes:
        name: short name, as GGUF files use it where they know the family.
        architectures: class names in ``architectures``.
        model_types: values of ``model_type``, used when ``architectures`` is absent.
        norm_eps_field, activation_field: what the config calls these.
        activation: the MLP's, whatever a field says; None: ``activation_field`` names it.
        full_every: without any field that selects layers, every n-th is full; 0: all alike.
        qkv_bias, o_bias, mlp_bias: whether these have a bias; a string names the field that says so. A mixture of
            experts has the router's with the MLP's.
        logit_scale_field: names the factor of the logits; "": 1.
        yarn_is_longrope: a rotary type yarn means LongRoPE, as its first files called it.
        nope_full: full layers of a hybrid have no rotary embedding.
        interleaved_rope: neighbouring dimensions form a pair.
        rope_scale_full_only: an old ``rope_scaling`` is meant for full layers alone (Gemma 3, OLMo 3).
        learned_sinks: one learned logit per head, whose probability is dropped.
        experts: the MLP is a mixture of experts.
        scaled_embedding: embeddings times sqrt(hidden_size), and query_pre_attn_scalar scales the products.
        own_head_dim: ``head_dim`` is read; False: a head is hidden_size / num_attention_heads whatever it says.
        defaults: field to value, where the config is silent.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    block: BlockKind = BlockKind.PRE
    norm: NormKind = NormKind.RMS
    norm_eps_field: str = "rms_norm_eps"
    qk_norm: QkNorm = QkNorm.NONE
    activation_field: str = "hidden_act"
    activation: Activation | None = None
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    logit_scale_field: str = ""
    yarn_is_longrope: bool = False
    full_every: int = 0
    nope_full: bool = False
    interleaved_rope: bool = False
    rope_scale_full_only: bool = False
    learned_sinks: bool = False
    experts: bool = False
    scaled_embedding: bool = False
    own_head_dim: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _defaults(**values: Any) -> dict[str, Any]:
    return {"hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False} | values


FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        ("LlamaForCausalLM",),
        ("llama",),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults=_defaults(
            max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, attention_bias=False
        ),
    ),
    Family(
        "mistral",
        ("MistralForCausalLM",),
        ("mistral",),
        defaults=_defaults(
            sliding_window=4096,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        ("mixtral",),
        experts=True,
        defaults=_defaults(
            rope_theta=1000000.0,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    Family(
        "qwen2",
        ("Qwen2ForCausalLM",),
        ("qwen2",),
        qkv_bias=True,
        defaults=_defaults(
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
        ),
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        ("qwen3",),
        qk_norm=QkNorm.HEAD,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        defaults=_defaults(
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            head_dim=128,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
        ),
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        ("gemma2",),
        block=BlockKind.SANDWICH,
        norm=NormKind.RMS_PLUS_ONE,
        activation_field="hidden_activation",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        full_every=2,
        scaled_embedding=True,
        defaults=_defaults(
            vocab_size=256000,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            max_position_embeddings=8192,
            rms_norm_eps=1e-6,
            query_pre_attn_scalar=256,
            sliding_window=4096,
            final_logit_softcapping=30.0,
            attn_logit_softcapping=50.0,
            tie_word_embeddings=True,
            bos_token_id=2,
            eos_token_id=1,
        ),
    ),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "gemma3"),
        block=BlockKind.SANDWICH,
        norm=NormKind.RMS_PLUS_ONE,
        qk_norm=QkNorm.HEAD,
        activation_field="hidden_activation",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        full_every=6,
        rope_scale_full_only=True,
        scaled_embedding=True,
        defaults=_defaults(
            vocab_size=262208,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
            query_pre_attn_scalar=256,
            sliding_window=4096,
            rope_theta=1000000.0,
            rope_local_base_freq=10000.0,
            tie_word_embeddings=True,
            bos_token_id=2,
            eos_token_id=1,
        ),
    ),
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        ("phi3",),
        yarn_is_longrope=True,
        defaults=_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=32000),
    ),
    Family(
        "cohere2",
        ("Cohere2ForCausalLM",),
        ("cohere2",),
        block=BlockKind.PARALLEL,
        norm=NormKind.LAYER,
        norm_eps_field="layer_norm_eps",
        logit_scale_field="logit_scale",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        full_every=4,
        nope_full=True,
        interleaved_rope=True,
        own_head_dim=False,
        defaults=_defaults(
            sliding_window=4096,
            max_position_embeddings=8192,
            layer_norm_eps=1e-5,
            logit_scale=0.0625,
            tie_word_embeddings=True,
            bos_token_id=5,
            eos_token_id=255001,
        ),
    ),
    Family(
        "olmo3",
        ("Olmo3ForCausalLM",),
        ("olmo3",),
        block=BlockKind.POST,
        qk_norm=QkNorm.FULL,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        full_every=4,
        rope_scale_full_only=True,
        defaults=_defaults(
            sliding_window=4096,
            rope_theta=500000.0,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            eos_token_id=50279,
        ),
    ),
    Family(
        "exaone4",
        ("Exaone4ForCausalLM",),
        ("exaone4",),
        block=BlockKind.POST,
        qk_norm=QkNorm.HEAD,
        nope_full=True,
        defaults=_defaults(
            sliding_window=4096,
            sliding_window_pattern=4,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            bos_token_id=0,
            eos_token_id=2,
        ),
    ),
    Family(
        "gpt-oss",
        ("GptOssForCausalLM",),
        ("gpt_oss",),
        activation=Activation.CLAMPED_SWIGLU,
        mlp_bias=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        full_every=2,
        learned_sinks=True,
        experts=True,
        defaults=_defaults(
            sliding_window=128,
            head_dim=64,
            num_key_value_heads=8,
            attention_bias=True,
            rope_theta=150000.0,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            num_local_experts=128,
            num_experts_per_tok=4,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
    ),
)
