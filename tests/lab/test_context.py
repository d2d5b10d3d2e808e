from __future__ import annotations

import pytest
import torch

from sash.bench.contest import Sash
from sash.lab.context import Context, all_full, all_windows, windows_of
from sash.lab.probe import trace
from sash.spec.errors import ConfigError
from sash.spec.sampling import SamplingParams
from sash.spec.span import Span


def test_engines_over_the_same_weights_answer_as_one_that_loads_them_itself(context: Context) -> None:
    prompt, params = context.ids(20), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    own = Sash(context.model, 64, context.options)
    _, [tokens] = own.answer([prompt], 8)
    first, second = context.llm(max_model_len=64), context.llm(max_model_len=128, page_size=8)
    for llm in (first, second, first):
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == tokens
    assert second.config.max_model_len == 128 and second.core.runner is not first.core.runner


def test_other_spans_change_what_is_seen_and_what_is_kept(context: Context) -> None:
    assert context.window == 5
    assert {layer.span for layer in all_full(context.spec).layers} == {Span.full()}
    assert {layer.span for layer in all_windows(context.spec, 9).layers} == {Span.sliding(9)}
    assert {layer.span for layer in windows_of(context.spec, 9).layers} == {Span.sliding(9), Span.full()}
    pools = {
        label: [pool["longest_pages"] for pool in context.llm(spec, max_model_len=200).stats()["pools"]]
        for label, spec in (("own", None), ("full", all_full(context.spec)), ("pure", all_windows(context.spec, 9)))
    }
    assert pools == {"own": [2, 50], "full": [50], "pure": [3]}


def test_a_trace_sees_every_layer_and_agrees_with_the_engine(context: Context) -> None:
    ids = context.ids(30)
    layers: dict[int, torch.Tensor] = {}
    out = trace(context.weights, ids, watch=lambda i, hidden: layers.update({i: hidden.clone()}))
    assert list(layers) == list(range(7)) and out.shape == (30, 64)
    llm = context.llm(max_model_len=64)
    [answer] = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    assert int(context.weights.decoder.logits(out[-1:]).argmax()) == answer.outputs[0].token_ids[0]
    wider = trace(context.weights, ids, all_full(context.spec))
    assert torch.equal(wider[:5], out[:5]) and not torch.allclose(wider[-1], out[-1], atol=1e-3)


def test_a_text_of_its_own_is_repeated(context: Context) -> None:
    other = Context(context.model, text="abc", options=context.options)
    assert other.ids(9) == [1, 68, 69, 70] * 2 + [1]


def test_lengths_that_are_asked_for_take_the_place_of_others(context: Context) -> None:
    assert context.lengths_of((10, 4000, 5000)) == [10, 4000] and context.in_windows((0.1, 2, 1000)) == [1, 10]
    other = Context(context.model, lengths=(7, 4090), options=context.options)
    assert other.lengths_of((10,)) == [7, 4090] and other.in_windows((2,), 10) == [7]
    with pytest.raises(ConfigError, match=r"no length of 5000 fits .* of 4096 tokens with 6 more; .* at most 4090"):
        context.lengths_of((5000,), 6)
