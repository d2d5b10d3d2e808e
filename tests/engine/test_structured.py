"""Answers of a required form: always valid, ended by their form, and no batch mate's concern."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.engine.conftest import OPTIONS, MakeLLM, assert_idle, poison
from tests.engine.test_core import failing, finish, tokens

from sash import LLM, SamplingParams
from sash.engine.core import EngineCore
from sash.engine.grammars import Grammars
from sash.engine.messages import AddRequest
from sash.engine.outputs import CompletionOutput
from sash.spec.errors import RequestError
from sash.spec.structured import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a", "bc", None, 7]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 3},
        "more": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "$defs": {
        "pair": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
    },
}
CHOICES = ["yes", "no", "no way", 'a "b"\n', ""]
GRAMMAR = 'start: item ("," item)*\nitem: /[a-c]{1,3}/ | "(" start ")"'
GBNF = 'root ::= item ("," item)*\nitem ::= [a-c]+ | "(" root ")"'
NESTED = re.compile(r"[a-c,()]+")


def fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def fits_grammar(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        assert depth >= 0
    return depth == 0 and NESTED.fullmatch(text) is not None and not re.search(r"\(\)|\(,|,\)|,,|^,|,$|\)\(", text)


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, fits_schema),
    "spaced": (
        {"json": {"type": "array", "items": {"const": 1}, "maxItems": 1}},
        lambda text: json.loads(text) in ([], [1]),
    ),
    "object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": r"(\d{2,3}-){1,3}[a-f]é?"}, re.compile(r"(\d{2,3}-){1,3}[a-f]é?").fullmatch),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "lark": ({"grammar": GRAMMAR}, fits_grammar),
    "gbnf": ({"grammar": GBNF}, fits_grammar),
}


@pytest.fixture(scope="module")
def _own(folder: Path) -> LLM:
    return poison(LLM(folder, **(OPTIONS | {"max_model_len": 256, "max_num_batched_tokens": 32})))


@pytest.fixture
def llm(_own: LLM) -> Iterator[LLM]:
    """Room for long answers; every page and mask must be free afterwards."""
    yield _own
    assert_idle(_own)
    assert_masks_free(_own)


def assert_masks_free(llm: LLM) -> None:
    grammars = llm.core.grammars
    assert grammars is not None
    grammars.poll()
    # A mask that a process still writes is given back with its answer.
    until = time.monotonic() + 10
    while len(grammars._free) < 1024 and time.monotonic() < until:
        time.sleep(0.005)
        grammars.poll()
    assert len(grammars._free) == 1024 and all(not link.users and not link.open for link in grammars._links)


def structured(**values: Any) -> SamplingParams:
    form = {name: values.pop(name) for name in list(values) if name in StructuredOutputs.__dataclass_fields__}
    return SamplingParams(**({"max_tokens": 200} | values), structured_outputs=StructuredOutputs(**form))


@pytest.mark.parametrize("form", FORMS)
def test_fifty_hot_answers_are_all_valid(llm: LLM, form: str) -> None:
    """A random model at temperature 1.5 writes noise: what fits, fits because of the grammar."""
    given, fits = FORMS[form]
    endless = form in ("spaced", "object", "lark", "gbnf")
    limit = 120 if endless else 200
    params = [structured(temperature=1.5, seed=seed, max_tokens=limit, **given) for seed in range(50)]
    complete = 0
    for output in llm.generate(["Answer: "] * 50, params):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == limit
            continue
        complete += 1
        assert (answer.finish_reason, answer.error) == ("stop", None)
        assert fits(answer.text), answer.text
    assert complete >= (2 if endless else 50)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_with_its_form(llm: LLM, temperature: float) -> None:
    """Neither ignore_eos nor min_tokens keep it going; max_tokens cuts it."""
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 100}):
        answer = llm.generate("x", structured(regex="a{3}", temperature=temperature, **more))[0].outputs[0]
        assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("aaa", "stop", 3)
    answer = llm.generate("x", structured(regex="a{30}", temperature=temperature, max_tokens=7))[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("aaaaaaa", "length")
    answer = llm.generate("x", structured(choice=[""], temperature=temperature))[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.error) == ("", "stop", None)


def test_a_form_that_may_go_on_ends_with_the_models_end_token(llm: LLM) -> None:
    bias = {2: 100.0}
    answer = llm.generate("x", structured(regex="a+", logit_bias=bias))[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.token_ids[-1]) == ("a", "stop", 2)
    answer = llm.generate("x", structured(regex="a+", logit_bias=bias, min_tokens=5))[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.token_ids[-1]) == ("aaaaa", "stop", 2)


def test_what_shapes_logits_shapes_what_the_form_allows(llm: LLM) -> None:
    a, b, c = (3 + ord(char) - 32 for char in "abc")

    def text(**values: Any) -> CompletionOutput:
        return llm.generate("x", structured(regex="[abc]{6}", **values))[0].outputs[0]

    assert text(logit_bias={b: 50.0}).text == "bbbbbb"
    assert text(bad_token_ids=[a, c]).text == "bbbbbb"
    assert text(allowed_token_ids=[c, 50, 51]).text == "cccccc"
    longer = structured(regex="[abc]{60}", temperature=0, frequency_penalty=2.0)
    assert set(llm.generate("x", longer)[0].outputs[0].text) == {*"abc"}
    answer = text(bad_token_ids=[a, b, c])
    assert answer.finish_reason == "error" and "ban all that structured_outputs allow" in str(answer.error)
    scored = text(temperature=0, logprobs=3)
    assert scored.logprobs is not None and len(scored.logprobs) == 6
    for token, at in zip(scored.token_ids, scored.logprobs, strict=True):
        assert at[token].logprob <= max(other.logprob for other in at.values())
    stopped = text(stop=["bb"], logit_bias={b: 50.0})
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "bb")


def test_greedy_takes_the_best_of_what_is_allowed(llm: LLM) -> None:
    free = llm.generate("x", SamplingParams(temperature=0, max_tokens=1, logprobs=100))[0].outputs[0]
    assert free.logprobs is not None
    order = sorted(free.logprobs[0].items(), key=lambda item: -item[1].logprob)
    printable = [token for token, _ in order if 3 <= token < 98]
    for start in (0, 10, 40):
        allowed = printable[start:]
        texts = "".join(llm.tokenizer.decode([token]) for token in allowed)
        best = llm.generate("x", structured(choice=list(texts), temperature=0))[0].outputs[0]
        assert best.token_ids == [allowed[0]]


def test_answers_to_one_prompt_each_follow_the_form(llm: LLM) -> None:
    params = structured(json=SCHEMA, n=6, seed=3, temperature=1.2, disable_any_whitespace=True)
    answers = llm.generate("x", params)[0].outputs
    assert len({answer.text for answer in answers}) > 3
    assert all(fits_schema(answer.text) for answer in answers)
    solo = llm.generate("x", structured(json=SCHEMA, seed=3, temperature=1.2, disable_any_whitespace=True))
    assert solo[0].outputs[0].token_ids == answers[0].token_ids


def test_batch_mates_are_not_touched(make_llm: MakeLLM) -> None:
    """Bit for bit, with ops whose rows don't depend on each other: greedy, sampled, and with probabilities."""
    llm = make_llm(deterministic=True)
    others = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(seed=5, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True),
    ]
    alone = [o.outputs for o in llm.generate(["one", "two", "three"], others)]
    mixed = llm.generate(["one", "x", "two", "three"], [others[0], structured(json=SCHEMA, seed=1), *others[1:]])
    assert [mixed[i].outputs for i in (0, 2, 3)] == alone
    again = llm.generate("x", structured(json=SCHEMA, seed=1))[0]
    assert again.outputs == mixed[1].outputs


def test_a_preempted_answer_goes_on_where_it_was(make_llm: MakeLLM) -> None:
    wide, tight = make_llm(deterministic=True), make_llm(deterministic=True, max_total_tokens=64)
    params = [structured(regex="([a-c]{2}-){20}", seed=seed, max_tokens=50) for seed in range(3)]
    wanted = [o.outputs for o in wide.generate(["x"] * 3, params)]
    assert [o.outputs for o in tight.generate(["x"] * 3, params)] == wanted
    assert tight.core.scheduler.num_preemptions > 0
    assert_masks_free(tight)


def test_a_step_that_raises_costs_no_token(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(deterministic=True)
    params = structured(json=SCHEMA, seed=1, n=2, max_tokens=40)
    wanted = llm.generate("x", params)[0].outputs
    count = 0

    def wrong(plan: Any) -> bool:
        nonlocal count
        count += 1
        return count % 5 == 0

    failing(llm.core, monkeypatch, wrong)
    assert llm.generate("x", params)[0].outputs == wanted
    assert llm.core.counters.failed_steps > 3


def test_no_drafts_are_made_for_it_and_others_keep_theirs(make_llm: MakeLLM) -> None:
    llm = make_llm(speculative="ngram", deterministic=True)
    plain = make_llm(deterministic=True)
    params = [
        structured(regex="(ab){20}", max_tokens=60),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    ]
    got = llm.generate(["abababababababab"] * 2, params)
    assert [o.outputs for o in got] == [o.outputs for o in plain.generate(["abababababababab"] * 2, params)]
    assert got[0].outputs[0].text == "ab" * 20 and got[0].metrics.draft_tokens == 0
    assert got[1].metrics.draft_tokens > 0


def test_scoring_a_prompt_needs_no_form(llm: LLM) -> None:
    params = structured(regex="a", max_tokens=0, prompt_logprobs=0)
    output = llm.generate("hello", params)[0]
    assert output.outputs[0].finish_reason == "length" and output.prompt_logprobs is not None


# ------------------------------------------------------------------------- masks that are late


class Slow:
    """Makes every mask come later than its row wants it."""

    def __init__(self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.waited = 0
        wait = grammars.wait

        def late(constraints: Any, patience_s: float) -> None:
            self.waited += 1
            if self.waited % (steps + 1) == 0:
                wait(constraints, 60.0)

        monkeypatch.setattr(grammars, "wait", late)
        monkeypatch.setattr(grammars, "poll", lambda: None)


def test_a_row_without_its_mask_is_computed_again_and_holds_up_nobody(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(deterministic=True)
    core, grammars = llm.core, llm.core.grammars
    assert grammars is not None
    form = StructuredOutputs(regex="([a-c]{2}-){8}")
    requests = {
        "form": SamplingParams(seed=1, max_tokens=40, structured_outputs=form),
        "free": SamplingParams(seed=2, max_tokens=40, ignore_eos=True),
    }

    def run() -> tuple[dict[str, list[int]], dict[str, int]]:
        for i, (name, params) in enumerate(requests.items()):
            core.add(AddRequest((name,), (5, 6, 7), params, (i,), (2,)))
        done: dict[str, int] = {}
        told: dict[str, list[int]] = {name: [] for name in requests}
        for step in range(500):
            for update in core.step() if core.has_work else []:
                told[update.answer_id] += update.token_ids
                if update.finish_reason:
                    done[update.answer_id] = step
        return told, done

    wanted, _ = run()
    Slow(grammars, monkeypatch, 3)
    got, done = run()
    assert got == wanted and core.counters.late_masks > 20
    assert done["free"] == 39 < done["form"]
    core.scheduler.check()


def test_a_late_mask_of_a_resumed_chunk_is_waited_for(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is gone when the preempted answer goes on."""
    llm = make_llm(deterministic=True, max_total_tokens=64)
    params = [structured(regex="([a-c]{2}-){20}", seed=seed, max_tokens=50) for seed in range(3)]
    wanted = [o.outputs for o in make_llm(deterministic=True).generate(["x"] * 3, params)]
    core, grammars = llm.core, llm.core.grammars
    assert grammars is not None
    preempt = core.scheduler.preempt

    def forgetting(ticket: Any) -> None:
        constraint = core._sequences[ticket.request_id].constraint
        assert constraint is not None
        preempt(ticket)
        seq = core._sequences[ticket.request_id]
        if seq.generated:
            constraint.link = None  # as after its process has ended
            grammars.ask(constraint, seq.tokens, seq.prompt_tokens)

    monkeypatch.setattr(core.scheduler, "preempt", forgetting)
    assert [o.outputs for o in llm.generate(["x"] * 3, params)] == wanted
    assert core.scheduler.num_preemptions > 0


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, 'structured_outputs json can.t be used: .*"uniqueItems"'),
        ({"json": {"type": "text"}}, "structured_outputs json can.t be used: .*text"),
        ({"json": {"$ref": "http://example.com/x.json"}}, "structured_outputs json can.t be used: .*example.com"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "structured_outputs json can.t be used"),
        ({"json": {"$ref": "#"}}, "no text can fit it"),
        ({"json": {"allOf": [{"const": 1}, {"const": 2}]}}, "structured_outputs json can.t be used"),
        ({"regex": "(a"}, "structured_outputs regex can.t be used: .*unclosed group"),
        ({"regex": "(?=a)b"}, "structured_outputs regex can.t be used: .*look-around"),
        ({"regex": r"(a)\1"}, "structured_outputs regex can.t be used: .*backreferences"),
        ({"regex": "日"}, "structured_outputs regex can.t be used: no text can fit it"),  # no token for its bytes
        ({"grammar": "start: nothing"}, "structured_outputs grammar can.t be used: .*nothing"),
        ({"grammar": "root ::= ("}, "structured_outputs grammar can.t be used"),
        ({"grammar": "\x00\x01"}, "structured_outputs grammar can.t be used"),
    ],
)
def test_a_form_that_can_not_be_compiled_is_refused(llm: LLM, form: dict[str, Any], message: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError, match=message) as error:
            llm.generate(["x", "y"], [SamplingParams(), structured(**form)])
        assert len(str(error.value)) < 700
    with pytest.raises(RequestError, match=message):
        llm.stream("x", structured(**form))


def test_an_answer_that_can_not_go_on_ends_with_the_reason(llm: LLM) -> None:
    """Of ü there is a token for the first byte, which é shares, and none for the second."""
    answer = llm.generate("x", structured(regex="aü"))[0].outputs[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("error", 2)
    assert answer.error == "structured_outputs can't be followed any further: no text can fit it"


def test_an_engine_without_a_tokenizer_refuses_it(llm: LLM) -> None:
    core = EngineCore(llm.core.config, 101, llm.core.runner)
    with pytest.raises(RequestError, match="structured_outputs need a tokenizer"):
        core.add(AddRequest(("a",), (5,), structured(regex="a"), (1,)))
    assert not core.has_work and finish(core) == {} and tokens([]) == []
