"""What a benchmark refuses before it loads anything, and the ceilings that it holds figures against."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.equivalence.harness import tiny_spec

from sash.bench import ceiling
from sash.bench.offline import Plan, run
from sash.spec.errors import ConfigError
from sash.spec.span import Span

PLAN = Plan("no-such-model", "bfloat16", "none", lengths=(16,), repeats=1, memory=())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, dtype="auto"), "--dtype 'auto' is unknown; use float32, bfloat16"),
        (replace(PLAN, against="vapour"), "--against 'vapour' is unknown; use transformers or none"),
    ],
)
def test_what_cannot_be_compared_is_refused_first(plan: Plan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(plan)


def test_a_window_bounds_what_decode_reads_and_prefill_multiplies() -> None:
    spec = tiny_spec([Span.sliding(4), Span.full()])
    layer = spec.layers[0]
    row = layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    layers, head = ceiling.weight_elements(spec)
    assert head == spec.vocab_size * spec.hidden_size
    assert ceiling.decode_bytes(spec, 9, 2) == 2 * (layers + head + (4 + 10) * row)
    pairs = (1 + 2 + 3 + 4 * 6) + sum(range(1, 10))
    products = layer.num_heads * (layer.head_dim + layer.v_head_dim)
    assert ceiling.prefill_flop(spec, 9) == 2 * layers * 9 + 2 * pairs * products + 2 * head
