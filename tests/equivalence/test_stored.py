"""K and V stored narrower than computed: what is seen depends on the row alone, not on the road to it."""

from __future__ import annotations

import pytest
import torch
from tests.equivalence.axes import AXES
from tests.equivalence.harness import Request, Rig, build, random_tokens, tiny_spec

from sash.spec.config import EngineConfig
from sash.spec.span import Span

SPEC = tiny_spec([Span.sliding(9), Span.full(), Span.sliding(9, sinks=2), Span.full()], v_head_dim=12)
PROMPT = random_tokens(70, 4)
KERNELS = [name for name in AXES["kernels"] if name != "deterministic"]


def engine(kernels: str, chunk: int, **options: object) -> Rig:
    config = EngineConfig(max_model_len=100, page_size=4, chunked_prefill_size=chunk, **options)  # type: ignore[arg-type]
    return build(SPEC, config, kernels=kernels, seed=3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_scores_do_not_depend_on_the_chunk(kernels: str) -> None:
    for chunk in (1, 5, 16, 70):
        rig = engine(kernels, chunk, kv_cache_dtype="int8")
        with torch.inference_mode():
            rig.assert_exact(rig.run([Request("a", PROMPT, 20)]))


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"swa_kv_cache_dtype": "int8"}], ids=str)
def test_int8_is_in_effect(options: dict[str, object]) -> None:
    """Against an oracle that rounds nothing, the scores are off."""
    rig = engine("torch", 16, **options)
    with torch.inference_mode():
        answers = rig.run([Request("a", PROMPT, 20)])
    rig.assert_exact(answers)
    rig.stored = lambda: ["float32"] * len(SPEC.layers)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="off"):
        rig.assert_exact(answers)
