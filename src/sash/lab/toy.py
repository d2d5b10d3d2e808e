"""Small models with random weights: stacks of layers as deep and with such windows as an experiment wants."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from sash.engine.build import Built, assemble, probe
from sash.engine.llm import engine_config
from sash.engine.runner import Runner
from sash.lab.context import Weights
from sash.spec.locate import ModelSource
from sash.spec.model import LayerSpec, MlpSpec, ModelSpec, RopeSpec, expected_weights
from sash.spec.span import Span


def toy_spec(spans: tuple[Span, ...], *, hidden: int = 64, vocab: int = 97, max_position: int = 4096) -> ModelSpec:
    """A plain decoder (norm before each part, residuals around it) with one layer for each span."""
    layers = tuple(
        LayerSpec(
            span,
            "toy",
            num_heads=4,
            num_kv_heads=2,
            head_dim=hidden // 4,
            v_head_dim=hidden // 4,
            scale=(hidden // 4) ** -0.5,
            rope=RopeSpec(hidden // 4),
            mlp=MlpSpec(2 * hidden),
        )
        for span in spans
    )
    return ModelSpec("toy", vocab, hidden, layers, max_position)


def toy_weights(spec: ModelSpec, seed: int, *, deterministic: bool = False) -> Weights:
    """Random weights, float32: linear layers keep the size of what goes through them, norms are 1."""
    source = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=source) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in expected_weights(spec).items()
    }
    fixed = {"dtype": "float32", "quantization": "none", "max_num_seqs": 1, "device": "cpu"}
    options = engine_config(fixed | {"deterministic": deterministic})
    core = assemble(spec, options.resolve(spec, probe("cpu")), tensors)
    return Weights(Built(core, cast(Runner, core.runner), spec, ModelSource("config", Path(), "toy"), core.config))
