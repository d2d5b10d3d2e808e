"""Messages survive serialisation, and so does a generation whose every message goes through it."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sash import LLM, SamplingParams
from sash.engine.core import EngineCore
from sash.engine.messages import AddRequest, CancelRequest, Update, decode, encode
from sash.spec.sampling import TokenLogprobs
from sash.spec.structured import StructuredOutputs

IDS = st.integers(0, 1 << 20)
MANY = st.lists(IDS, max_size=4).map(tuple)
NUMBERS = st.floats(-2, 2)
LOGPROBS = st.floats(max_value=0, allow_nan=False)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 9),
    temperature=st.floats(0, 10),
    top_k=st.integers(-1, 99),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    logit_bias=st.dictionaries(IDS, st.floats(-1e30, 1e30), max_size=3),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=3),
    bad_token_ids=MANY,
    stop=st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=2),
    stop_token_ids=MANY,
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 5),
    max_tokens=st.none() | st.integers(5, 99),
    seed=st.none() | st.integers(),
    logprobs=st.none() | st.integers(0, 100),
    prompt_logprobs=st.none() | st.integers(0, 100),
    skip_special_tokens=st.booleans(),
)
SCORES = st.builds(
    TokenLogprobs, IDS, LOGPROBS, IDS, st.lists(IDS, max_size=3).map(tuple), st.lists(LOGPROBS, max_size=3).map(tuple)
)
ADD = st.builds(
    AddRequest,
    answer_ids=st.lists(st.text(), max_size=3).map(tuple),
    prompt_token_ids=MANY,
    params=PARAMS,
    seeds=st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple),
    stop_token_ids=MANY,
)
UPDATE = st.builds(
    Update,
    answer_id=st.text(),
    token_ids=MANY,
    logprobs=st.lists(SCORES, max_size=2).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | SCORES, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(["stop", "length", "error"]),
    error=st.none() | st.text(),
    computed_tokens=IDS,
    preemptions=IDS,
    scheduled_at_s=st.none() | st.floats(allow_nan=False),
)


@settings(max_examples=60)
@given(ADD | UPDATE | st.builds(CancelRequest, st.text()))
def test_every_message_survives(message: AddRequest | CancelRequest | Update) -> None:
    data = encode([message, message])
    assert isinstance(data, bytes)
    assert decode(data) == [message, message]


def test_scores_of_impossible_tokens_survive() -> None:
    message = Update("0.0", logprobs=(TokenLogprobs(3, -math.inf, 101, (1,), (-0.25,)),))
    assert decode(encode([message])) == [message]


@pytest.mark.parametrize(
    "data",
    [msgspec.msgpack.encode(wrong) for wrong in ([["Delete", "0.0"]], {}, 3, [["CancelRequest", 1]], [["Update"]])]
    + [b"", b"\xc1", encode([CancelRequest("0.0")])[:-1]],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


class SerialisedCore:
    """A core as it looks from another process: nothing reaches it, or leaves it, but bytes."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.sent = 0

    def _through(self, message: object) -> object:
        self.sent += 1
        return decode(encode([message]))[0]  # type: ignore[list-item]

    def check_request(self, request: AddRequest) -> None:
        self._core.check_request(self._through(request))  # type: ignore[arg-type]

    def compile(self, request: AddRequest) -> None:
        self._core.compile(self._through(request))  # type: ignore[arg-type]

    def add(self, request: AddRequest) -> None:
        self._core.add(self._through(request))  # type: ignore[arg-type]

    def cancel(self, request: CancelRequest) -> None:
        self._core.cancel(self._through(request))  # type: ignore[arg-type]

    def step(self) -> list[Update]:
        return [self._through(update) for update in self._core.step()]  # type: ignore[misc]


def test_a_generation_through_bytes_is_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(
            n=2, seed=3, max_tokens=9, logprobs=2, prompt_logprobs=1, logit_bias={40: 2.0}, presence_penalty=0.5
        ),
        SamplingParams(seed=-4, max_tokens=20, stop=["e", "a"], stop_token_ids=[90], min_tokens=2),
        SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[5, 6, 7], bad_token_ids=[6]),
        SamplingParams(seed=2, structured_outputs=StructuredOutputs(json={"enum": ["a", 5]})),
    ]
    prompts = ["One text", "Another one", "The third", "The fourth"]
    direct = llm.generate(prompts, params)
    core = SerialisedCore(llm.core)
    monkeypatch.setattr(llm, "core", core)
    through = llm.generate(prompts, params)
    stream = llm.stream("left early", params[2])
    next(stream)
    stream.close()
    monkeypatch.undo()
    assert core.sent > 20
    for a, b in zip(direct, through, strict=True):
        assert (a.outputs, a.prompt_logprobs, a.prompt_token_ids) == (b.outputs, b.prompt_logprobs, b.prompt_token_ids)
