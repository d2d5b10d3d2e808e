"""SamplingParams refuse what can't work, by the name of the field."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from sash import SamplingParams
from sash.spec.errors import RequestError

WRONG = [
    ("n", 0), ("n", 1025), ("n", 2**40), ("n", 1.0), ("n", True), ("n", None), ("n", "2"),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
    ("temperature", None), ("temperature", True), ("temperature", 10**400),
    ("top_k", -2), ("top_k", 2.5), ("top_k", "all"), ("top_k", False),
    ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", "0.9"),
    ("min_p", -0.01), ("min_p", 1.5), ("min_p", None),
    ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("repetition_penalty", math.inf),
    ("repetition_penalty", [1.0]),
    ("presence_penalty", -2.1), ("presence_penalty", math.nan), ("presence_penalty", "1"),
    ("frequency_penalty", 2.1), ("frequency_penalty", {}),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.inf}), ("logit_bias", {1: 1e39}), ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: "x"}), ("logit_bias", [1, 2]),
    ("allowed_token_ids", []), ("allowed_token_ids", [1.5]), ("allowed_token_ids", 3), ("allowed_token_ids", "12"),
    ("bad_token_ids", [True]), ("bad_token_ids", 3), ("bad_token_ids", b"12"), ("bad_token_ids", {1: 2}),
    ("stop", [1]), ("stop", ""), ("stop", ["a", ""]), ("stop", 5), ("stop", [None]),
    ("stop_token_ids", [1.5]), ("stop_token_ids", ["2"]), ("stop_token_ids", 2),
    ("include_stop_str_in_output", 1), ("include_stop_str_in_output", None),
    ("ignore_eos", "yes"), ("skip_special_tokens", 0),
    ("min_tokens", -1), ("min_tokens", 1.0), ("min_tokens", None),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "16"), ("max_tokens", True),
    ("seed", 1.5), ("seed", "1"), ("seed", True),
    ("logprobs", -1), ("logprobs", 101), ("logprobs", True), ("logprobs", 2.0),
    ("prompt_logprobs", -1), ("prompt_logprobs", 101), ("prompt_logprobs", "1"),
    ("structured_outputs", 5), ("structured_outputs", {}), ("structured_outputs", "json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: str(v)[:20])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^(each \w+ of |each of )?{name} must be .+, got "):
        SamplingParams(**{name: value})


def test_every_field_is_among_the_wrong_ones() -> None:
    assert {name for name, _ in WRONG} == set(SamplingParams.__dataclass_fields__)


def test_fields_that_don_t_go_together() -> None:
    with pytest.raises(RequestError, match=r"max_tokens must be .*min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_values_of_equal_meaning_are_equal() -> None:
    """Lists, tuples, arrays and numpy numbers; None is nothing, so that parameters of other engines carry over."""
    given = SamplingParams(
        n=np.int64(2),
        temperature=Fraction(1, 2),
        top_p=np.float64(0.5),
        top_k=-1,
        stop="ab",
        stop_token_ids=np.array([4, 5]),
        bad_token_ids=[6],
        allowed_token_ids=range(3),
        logit_bias={np.int32(3): np.float32(0.5)},
        seed=-(1 << 70),
    )
    assert given == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.5,
        top_k=0,
        stop=("ab",),
        stop_token_ids=(4, 5),
        bad_token_ids=(6,),
        allowed_token_ids=(0, 1, 2),
        logit_bias={3: 0.5},
        seed=-(1 << 70),
    )
    assert type(given.n) is int and type(given.logit_bias[3]) is float
    empty = SamplingParams(stop=None, stop_token_ids=None, bad_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert empty == SamplingParams()


def test_the_caller_s_own_lists_may_change_later() -> None:
    stops, biases = ["a"], {1: 1.0}
    params = SamplingParams(stop=stops, logit_bias=biases)
    stops.append("b")
    biases[2] = 2.0
    assert params.stop == ("a",) and params.logit_bias == {1: 1.0}
