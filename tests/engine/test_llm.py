"""LLM: prompts in every form, refusals that start nothing, streams, chat and statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.engine.conftest import MakeLLM, assert_idle

from sash import LLM, RequestOutput, SamplingParams
from sash.engine.llm import engine_config
from sash.spec.errors import ConfigError, ModelError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)


def answer(out: RequestOutput) -> list[int]:
    return out.outputs[0].token_ids


# ------------------------------------------------------------------------------------- prompts


def test_a_prompt_in_any_form_gives_the_same(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hi there")
    assert ids[0] == 1 and len(ids) == 9
    forms: list[Any] = ["Hi there", ids, tuple(ids), {"prompt": "Hi there"}, {"prompt_token_ids": ids}]
    whole = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(outs) == 1 for outs in whole)
    listed = llm.generate(forms, GREEDY)
    for (out,), again, form in zip(whole, listed, forms, strict=True):
        text = isinstance(form, str) or "prompt" in form
        assert out.prompt == again.prompt == ("Hi there" if text else None)
        assert out.prompt_token_ids == again.prompt_token_ids == ids
        assert answer(out) == answer(again) == answer(whole[0][0])
        assert out.outputs[0].text == llm.tokenizer.decode(answer(out))
    assert llm.generate([], GREEDY) == []


def test_outputs_stand_in_the_order_of_the_prompts_with_their_own_params(llm: LLM) -> None:
    """More prompts than seats, short ones last: they end in another order than they came."""
    prompts = ["a longer prompt " * 2, "b", "c" * 20, "d", "e", "f"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 1, 9, 2, 3, 4)]
    outs = llm.generate(prompts, params)
    assert [o.prompt for o in outs] == prompts
    assert [len(answer(o)) for o in outs] == [20, 1, 9, 2, 3, 4]
    assert len({o.request_id for o in outs}) == 6
    for out, prompt, own in zip(outs, prompts, params, strict=True):
        assert answer(llm.generate(prompt, own)[0]) == answer(out)


def test_default_params_answer_16_tokens(llm: LLM) -> None:
    assert len(answer(llm.generate("x")[0])) <= 16


def test_a_character_in_two_tokens_comes_whole(llm: LLM) -> None:
    """The bytes of é are tokens of their own; between them nothing is shown."""
    first, second = llm.tokenizer.encode("é", add_bos=False)
    only = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    pair = SamplingParams(allowed_token_ids=[first, second], logit_bias={first: 1000.0}, frequency_penalty=2.0, **only)
    half = llm.generate("x", pair)[0].outputs[0]
    assert half.token_ids == [first] * 4 and half.text == "\ufffd" * 4
    texts = [d.outputs[0].text for d in llm.stream("x", pair)]
    assert texts == ["", "\ufffd", "\ufffd", "\ufffd\ufffd"]


# ------------------------------------------------------------------------------------ refusals

REFUSED: list[tuple[Any, Any, str]] = [
    ("", GREEDY, "prompt is empty"),
    ([[]], GREEDY, "prompt is empty"),
    ({"prompt_token_ids": []}, GREEDY, "prompt is empty"),
    ({"text": "x"}, GREEDY, "key prompt or prompt_token_ids"),
    ([["a", "b"]], GREEDY, "must be integers, got 'a' at place 0"),
    ([[1, True]], GREEDY, "must be integers, got True at place 1"),
    ([3, "x"], GREEDY, "must be integers, got 'x' at place 1"),
    (b"text", GREEDY, "got bytes; decode them"),
    ([bytearray(b"text")], GREEDY, "got bytes; decode them"),
    ({"prompt": b"text"}, GREEDY, "got bytes; decode them"),
    ([1.5], GREEDY, "got float"),
    (None, GREEDY, "got NoneType"),
    (7, GREEDY, "got int"),
    ([3] * 64, GREEDY, "64 tokens and max_model_len is 64: shorten it to 63 tokens or raise max_model_len"),
    ([3] * 65, SamplingParams(max_tokens=0, prompt_logprobs=0), "65 tokens and max_model_len is 64"),
    ([3, 101], GREEDY, "prompt has token id 101; ids of this model are 0 to 100"),
    ([-1], GREEDY, "prompt has token id -1"),
    ("x", SamplingParams(logit_bias={101: 1.0}), "logit_bias has token id 101"),
    ("x", SamplingParams(allowed_token_ids=[5, 999]), "allowed_token_ids has token id 999"),
    ("x", SamplingParams(bad_token_ids=[-5]), "bad_token_ids has token id -5"),
    ("x", SamplingParams(stop_token_ids=[101]), "stop_token_ids has token id 101"),
    ("x", [GREEDY, GREEDY], "2 sampling_params for 1 prompts: give one, or one per prompt"),
    (["x", "y"], [GREEDY], "1 sampling_params for 2 prompts"),
    ("x", {"max_tokens": 3}, "sampling_params must be SamplingParams"),
    (["x"], [None], "sampling_params must be SamplingParams"),
]


@pytest.mark.parametrize(("prompts", "params", "message"), REFUSED, ids=[m[:24] for _, _, m in REFUSED])
def test_what_can_t_run_is_refused(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)


def test_numpy_token_ids_are_token_ids(llm: LLM) -> None:
    wanted = answer(llm.generate([7, 8, 9], GREEDY)[0])
    for ids in (list(np.array([7, 8, 9])), [list(np.array([7, 8, 9], np.int32))]):
        assert answer(llm.generate(ids, GREEDY)[0]) == wanted  # type: ignore[arg-type]


def test_a_stream_checks_its_params(llm: LLM) -> None:
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
        llm.stream("x", {"max_tokens": 3})  # type: ignore[arg-type]


def test_nothing_is_started_when_one_of_many_is_refused(llm: LLM) -> None:
    steps = llm.stats()["steps"]
    with pytest.raises(RequestError, match=r"^prompt 2: prompt has token id 500"):
        llm.generate(["a", "b", [500]], GREEDY)
    assert_idle(llm)
    assert llm.stats()["steps"] == steps and not llm.core.has_work


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(make_llm: MakeLLM) -> None:
    """max_model_len fits the pools by definition, so the pool is made smaller behind its back."""
    llm = make_llm(max_total_tokens=48, max_model_len=48)
    ledger = llm.core.ledger
    full = next(i for i, g in enumerate(ledger.groups) if not g.bounded)
    ledger.pools[full].num_pages -= 4
    try:
        with pytest.raises(RequestError, match=r"needs 12 pages of the full pool, which has 8; lower max_tokens"):
            llm.generate("a prompt", SamplingParams(max_tokens=None))
    finally:
        ledger.pools[full].num_pages += 4
    assert len(answer(llm.generate("a prompt", SamplingParams(max_tokens=None, ignore_eos=True))[0])) == 39


# ------------------------------------------------------------------------------------- options


def test_an_unknown_option_is_answered_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_modl_len'; did you mean max_model_len\?"):
        LLM(folder, max_modl_len=5)
    with pytest.raises(ConfigError, match=r"did you mean max_predict_length\?"):
        LLM(folder, max_predict_lenght=5)
    with pytest.raises(ConfigError, match=r"^unknown option 'zzz'$"):
        LLM(folder, zzz=5)


def test_aliases(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", page_size=4, max_total_num_tokens=56, max_predict_length=40)
    assert llm.config.max_model_len == 40
    assert dict(zip([g.name for g in llm.config.groups], llm.config.pages, strict=True))["full"] == 14
    with pytest.raises(ConfigError, match="max_model_len is given twice"):
        engine_config({"max_model_len": 5, "max_predict_length": 5})


# ------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_joined_are_the_answer(llm: LLM, n: int) -> None:
    params = SamplingParams(
        n=n, seed=3, max_tokens=25, stop=["zz", "+1"], logprobs=1, prompt_logprobs=1, ignore_eos=True
    )
    (whole,) = llm.generate("The window slides", params)
    deltas = list(llm.stream("The window slides", params))
    assert len(deltas) >= n * 5
    assert sum(d.prompt_logprobs is not None for d in deltas) == 1
    for i in range(n):
        own = [o for d in deltas for o in d.outputs if o.index == i]
        assert "".join(o.text for o in own) == whole.outputs[i].text
        assert [t for o in own for t in o.token_ids] == answer_of(whole, i)
        joined = [p for o in own for p in o.logprobs or []]
        assert [set(p) for p in joined] == [set(p) for p in whole.outputs[i].logprobs or []]
        assert [o.finish_reason for o in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == whole.outputs[i].finish_reason


def answer_of(out: RequestOutput, i: int) -> list[int]:
    return out.outputs[i].token_ids


def test_a_stream_gives_each_token_when_it_comes(llm: LLM) -> None:
    deltas = list(llm.stream("x", GREEDY))
    assert [len(d.outputs[0].token_ids) for d in deltas] == [1] * 6


@pytest.mark.parametrize("read", [0, 1, 5])
def test_leaving_a_stream_early_frees_its_pages(llm: LLM, read: int) -> None:
    stream = llm.stream("The window slides", SamplingParams(n=2, max_tokens=30, ignore_eos=True))
    for _ in range(read):
        next(stream)
    assert bool(llm.core.ledger.requests) == bool(read)
    del stream
    assert_idle(llm)
    list(llm.stream("x", GREEDY))
    assert not llm.core.has_work


def test_streams_read_in_turn_run_together(llm: LLM) -> None:
    alone = [answer(llm.generate(p, DRAWN)[0]) for p in ("first", "the second")]
    before = llm.stats()["steps"]
    streams = [llm.stream("first", DRAWN), llm.stream("the second", DRAWN)]
    got: list[list[int]] = [[], []]
    for deltas in zip(*streams, strict=True):
        for mine, delta in zip(got, deltas, strict=True):
            mine += delta.outputs[0].token_ids
    assert got == alone
    assert llm.stats()["steps"] - before < 40  # one after the other takes 60


def test_generate_goes_on_with_an_open_stream(llm: LLM) -> None:
    alone = answer(llm.generate("first", DRAWN)[0])
    stream = llm.stream("first", DRAWN)
    got = next(stream).outputs[0].token_ids
    assert answer(llm.generate("other", GREEDY)[0]) == answer(llm.generate("other", GREEDY)[0])
    assert got + [t for d in stream for t in d.outputs[0].token_ids] == alone


def test_a_stream_that_can_t_run_is_refused_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 500"):
        llm.stream([500])


# ------------------------------------------------------------------------- what there is to see


def test_statistics_show_the_pages_of_each_request(llm: LLM) -> None:
    """A window of 5 in pages of 4 takes at most 2 pages; a full layer one page for every 4 rows."""
    streams = [llm.stream([5] * 21, DRAWN), llm.stream([6] * 9, DRAWN)]
    for _ in range(6):
        for stream in streams:
            next(stream)
    stats = llm.stats()
    assert stats["running"] == 2 and stats["waiting"] == 0
    pools = {pool["name"]: pool for pool in stats["pools"]}
    assert {name: (p["span"], p["layers"], p["page_size"]) for name, p in pools.items()} == {
        "window": ("window 5", 6, 4),
        "full": ("full", 1, 4),
    }
    for pool in pools.values():
        assert len(pool["requests"]) == 2
        assert sum(pool["requests"].values()) == pool["held_pages"] == pool["num_pages"] - pool["free_pages"]
        assert pool["peak_pages"] >= pool["held_pages"]
    rows = [t.computed for t in llm.core.scheduler.running]
    assert rows[0] >= 26 and rows[1] >= 14
    assert list(pools["full"]["requests"].values()) == [-(-n // 4) for n in rows]
    assert list(pools["window"]["requests"].values()) == [2, 2]
    # One K and V row of one layer: one head of 32 and 32 float32 numbers.
    assert pools["window"]["page_bytes"] == 6 * pools["full"]["page_bytes"] == 6 * 4 * 64 * 4
    assert (pools["window"]["kind"], pools["window"]["window"], pools["full"]["kind"]) == ("sliding", 5, "full")
    assert stats["uniform_bytes"] == sum(-(-n // 4) for n in rows) * 7 * 4 * 64 * 4
    for stream in streams:
        stream.close()


def test_metrics_are_filled(llm: LLM) -> None:
    (out,) = llm.generate("The window slides", GREEDY)
    metrics = out.metrics
    assert metrics.queue_s is not None and metrics.first_token_s is not None and metrics.total_s is not None
    assert 0 <= metrics.queue_s <= metrics.first_token_s <= metrics.total_s < 60
    assert metrics.preemptions == 0


def test_preemptions_are_told_and_change_nothing(make_llm: MakeLLM, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["first one", "the other"]
    small = make_llm(max_total_tokens=48, max_model_len=48)
    outs = small.generate(prompts, params)
    assert [o.metrics.preemptions for o in outs] == [0, small.stats()["preemptions"]]
    assert small.stats()["preemptions"] > 0
    assert [answer(o) for o in outs] == [answer(o) for o in llm.generate(prompts, params)]


def test_progress_is_told(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    llm = LLM(folder, progress=lambda *a: told.append(a), dtype="float32", max_model_len=64, max_num_batched_tokens=16)
    assert told
    told.clear()
    llm.generate(["a", "b"], GREEDY)
    assert told[-1] == ("requests", 2, 2)
    told.clear()
    list(llm.stream([5] * 40, GREEDY))
    assert told == [("prompt", n, 40) for n in (16, 32, 40)]  # and never again while the answer is written


# ---------------------------------------------------------------------------------------- chat


def test_chat_without_a_template_is_refused_with_the_fix(llm: LLM) -> None:
    with pytest.raises(ModelError, match=r"no chat template: give LLM\.chat_prompt one"):
        llm.chat([{"role": "user", "content": "Hello"}])


def test_chat_goes_through_the_model_s_template(folder: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    other = tmp_path / "chatty"
    shutil.copytree(folder, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    llm = make_llm(other)
    out = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
    assert out.prompt_token_ids == llm.tokenizer.encode("[user]Hello[assistant]")
    assert answer(out) == answer(llm.generate("[user]Hello[assistant]", GREEDY)[0])


# ---------------------------------------------------------------------------- a broken model


def test_a_model_that_gives_nan_answers_with_an_error(folder: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
    other = tmp_path / "broken"
    shutil.copytree(folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, other / "model.safetensors")
    llm = make_llm(other)
    for params in (GREEDY, DRAWN, SamplingParams(logprobs=2, prompt_logprobs=2, n=2, top_p=0.5, min_p=0.1)):
        (out,) = llm.generate("x", params)
        for one in out.outputs:
            assert (one.finish_reason, one.token_ids) == ("error", [])
            assert "not finite" in str(one.error)
