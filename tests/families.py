"""Every model family, tiny and random, built and saved by transformers: the oracle's side of the tests.

Windows are smaller than the texts, heads are grouped, and every parameter is random, norm weights,
biases and sinks included, so that nothing that is skipped or swapped can go unnoticed.

    model, folder = build("gemma3", tmp_path)
    wanted = oracle_logits(model, ids)          # [T, vocab] float32
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 101
SHORT = [0.9, 1.0, 1.1, 1.3, 1.7, 2.1, 2.5, 3.0]
LONG = [1.0, 1.2, 1.8, 2.6, 4.0, 5.5, 7.0, 9.0]
# Longest text that the oracle sees. LongRoPE's original context lies below it, to reach the long set.
MAX_TEXT = 48

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Builder = Callable[[], PreTrainedConfig]


def _config(class_name: str, **values: Any) -> Builder:
    def make() -> PreTrainedConfig:
        return getattr(transformers, class_name)(**{**COMMON, **values})

    return make


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


def _per_type(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": sliding}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16)

FAMILIES: dict[str, Builder] = {
    "llama": _config("LlamaConfig", attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama-linear": _config("LlamaConfig", rope_parameters=_rope("linear", factor=2.5), head_dim=32),
    "llama-dynamic": _config("LlamaConfig", rope_parameters=_rope("dynamic", factor=3.0)),
    "llama-dynamic-grown": _config(
        "LlamaConfig", rope_parameters=_rope("dynamic", factor=3.0), max_position_embeddings=20
    ),
    "llama-yarn": _config("LlamaConfig", rope_parameters=_YARN),
    "llama-yarn-mscale": _config(
        "LlamaConfig",
        rope_parameters=_YARN | {"mscale": 0.8, "mscale_all_dim": 0.3, "truncate": False, "beta_fast": 4.0},
    ),
    "llama-llama3": _config(
        "LlamaConfig",
        rope_parameters=_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    "mistral": _config("MistralConfig", sliding_window=7),
    "mistral-full": _config("MistralConfig", sliding_window=None, tie_word_embeddings=True),
    "mixtral": _config("MixtralConfig", sliding_window=9, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _config("Qwen2Config", use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "qwen2-full": _config("Qwen2Config", use_sliding_window=False, sliding_window=6),
    "qwen3": _config("Qwen3Config", use_sliding_window=True, sliding_window=5, max_window_layers=1, head_dim=24),
    "gemma2": _config(
        "Gemma2Config",
        sliding_window=6,
        head_dim=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=8.0,
        final_logit_softcapping=12.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        num_hidden_layers=7,
        sliding_window=5,
        head_dim=32,
        num_key_value_heads=1,
        query_pre_attn_scalar=24,
        rope_parameters=_per_type(_rope("linear", rope_theta=1e6, factor=8.0), _rope("default")),
    ),
    "phi3": _config("Phi3Config", sliding_window=8),
    "phi3-longrope-short": _config(
        "Phi3Config",
        rope_parameters=_rope("longrope", short_factor=SHORT, long_factor=LONG),
        original_max_position_embeddings=MAX_TEXT,
        max_position_embeddings=4 * MAX_TEXT,
    ),
    "phi3-longrope-long": _config(
        "Phi3Config",
        rope_parameters=_rope("longrope", short_factor=SHORT, long_factor=LONG),
        original_max_position_embeddings=16,
        max_position_embeddings=128,
        sliding_window=9,
    ),
    "phi3-partial": _config("Phi3Config", rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    "cohere2": _config("Cohere2Config", sliding_window=7, num_hidden_layers=5, attention_bias=True, logit_scale=0.8),
    "olmo3": _config(
        "Olmo3Config",
        sliding_window=6,
        num_hidden_layers=5,
        rope_parameters=_per_type(_YARN | {"rope_theta": 5e5}, _rope("default", rope_theta=5e5)),
    ),
    "exaone4": _config("Exaone4Config", sliding_window=8, sliding_window_pattern=3, num_hidden_layers=5, head_dim=16),
    "gpt-oss": _config(
        "GptOssConfig",
        sliding_window=7,
        num_hidden_layers=5,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_rope(
            "yarn", factor=4.0, truncate=False, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=1.0
        ),
    ),
}

# max_model_len under which the engine fixes the frequency set that transformers uses for MAX_TEXT tokens.
MAX_MODEL_LEN: dict[str, int] = {"phi3-longrope-short": MAX_TEXT, "llama-dynamic-grown": MAX_TEXT}


def max_model_len(name: str) -> int:
    """The engine setting under which ``name`` agrees with its oracle over MAX_TEXT tokens."""
    return MAX_MODEL_LEN.get(name, 128)


def build(name: str, folder: Path, **changes: Any) -> tuple[PreTrainedModel, Path]:
    """A random float32 model of a family, saved under ``folder`` / ``name``.

    ``changes`` are set on the config. The same name gives the same numbers each time.
    """
    transformers.utils.logging.disable_progress_bar()
    config = FAMILIES[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                base = 0.0 if name.startswith("gemma") else 1.0
                parameter.copy_(base + 0.3 * noise)
            else:
                parameter.copy_(noise * _spread(key, parameter, config))
    target = folder / name
    model.save_pretrained(target)
    return model, target


def _spread(key: str, parameter: torch.Tensor, config: PreTrainedConfig) -> float:
    """Standard deviation that keeps logits within about 10, where the tolerance is tight, and attention uneven."""
    if "embed" in key and config.tie_word_embeddings:
        return 0.2
    return 1.0 if parameter.dim() == 1 or "embed" in key else 2.0 / parameter.shape[-1] ** 0.5


def oracle_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Scores of every position of ids [T]: [T, vocab] float32, eager attention, no cache."""
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0].float()


def tokens(seed: int, count: int) -> torch.Tensor:
    """Random token ids [count], int64, above the special ones."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
