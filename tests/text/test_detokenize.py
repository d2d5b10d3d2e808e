"""Streaming text: whole characters, stop strings across tokens, and the same answer however tokens are grouped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.real_models import real_model
from tests.text.fakes import ByteTokenizer

from sash.text.base import Tokenizer
from sash.text.detokenize import IncrementalText, StopChecker
from sash.text.load import load_tokenizer

FLAG = "🇩🇪👩‍👧 滑动 e\u0301"


def stream(
    tokenizer: Tokenizer, groups: Sequence[Sequence[int]], **options: object
) -> tuple[list[str], IncrementalText]:
    """What each push returns, and last what finish does."""
    text = IncrementalText(tokenizer, **options)  # type: ignore[arg-type]
    shown = [text.push(ids) for ids in groups]
    return [*shown, text.finish()], text


def one_by_one(text: str | bytes) -> list[list[int]]:
    return [[b] for b in (text.encode() if isinstance(text, str) else text)]


def test_half_characters_are_never_shown() -> None:
    shown, text = stream(ByteTokenizer(), one_by_one(FLAG))
    assert "".join(shown) == text.text == FLAG
    assert not any("\ufffd" in part for part in shown)
    assert shown[:4] == ["", "", "", "🇩"]


@pytest.mark.real
@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_real_tokens_that_split_characters(name: str) -> None:
    tokenizer = load_tokenizer(real_model(name))
    text = "a🫠🇩🇪👩‍👩‍👧 滑动窗口 한국어 𓀀𒀀 é"
    ids = tokenizer.encode(text, add_bos=False)
    split = [i for i in ids if not tokenizer.token_bytes(i).decode("utf-8", "ignore")]
    assert len(split) > 3  # some tokens hold no whole character
    shown, incremental = stream(tokenizer, [[i] for i in ids])
    assert "".join(shown) == incremental.text == text
    assert not any("\ufffd" in part for part in shown)


def test_an_unfinished_character_becomes_a_replacement_only_at_the_end() -> None:
    shown, text = stream(ByteTokenizer(), one_by_one(b"a\xf0\x9f\x98"))
    assert shown == ["a", "", "", "", "\ufffd"]
    assert text.text == "a\ufffd"
    assert text.finish() == ""


def test_impossible_bytes_are_shown_once_they_are_certain() -> None:
    shown, _ = stream(ByteTokenizer(), one_by_one(b"\xff\xe6\xbba\xe6\xbb\x91"))
    assert shown == ["\ufffd", "", "", "\ufffda", "", "", "滑", ""]


def test_special_tokens_are_left_out_or_kept() -> None:
    tokenizer = ByteTokenizer([b"<eos>", b"<b>"], special=[256])
    assert "".join(stream(tokenizer, [[104], [256], [257]])[0]) == "h<b>"
    assert "".join(stream(tokenizer, [[104], [256], [257]], skip_special=False)[0]) == "h<eos><b>"
    assert "".join(stream(tokenizer, [[104], [9999]])[0]) == "h"


def test_the_first_space_goes_only_at_the_start_of_a_text() -> None:
    tokenizer = ByteTokenizer([b" a", b""], strips_space=True)
    assert "".join(stream(tokenizer, [[256], [256]])[0]) == " a a"
    assert stream(tokenizer, [[257], [256], [256]], at_start=True)[0] == ["", "a", " a", ""]
    assert "".join(stream(ByteTokenizer([b" a"]), [[256]], at_start=True)[0]) == " a"


@pytest.mark.parametrize(("include", "want"), [(False, "one "), (True, "one STOP")])
def test_a_stop_string_across_tokens(include: bool, want: str) -> None:
    tokenizer = ByteTokenizer([b"one S", b"TO", b"P two"])
    shown, text = stream(tokenizer, [[256], [257], [258], [256]], stop=["STOP"], include_stop=include)
    assert shown == ["one ", "", want[4:], "", ""]
    assert (text.text, text.stopped) == (want, "STOP")


def test_what_turns_out_to_be_no_stop_string_is_shown() -> None:
    tokenizer = ByteTokenizer([b"a ST", b"S", b"TO"])
    shown, text = stream(tokenizer, [[256], [257], [258]], stop=["STOP"])
    assert shown == ["a ", "ST", "", "STO"]
    assert (text.text, text.stopped) == ("a STSTO", None)


def test_a_stop_string_inside_one_character_s_bytes_and_repeated_starts() -> None:
    tokenizer = ByteTokenizer()
    shown, text = stream(tokenizer, one_by_one("ab滑动cd"), stop=["动"])
    assert ("".join(shown), text.stopped) == ("ab滑", "动")
    shown, text = stream(tokenizer, one_by_one("aaab!"), stop=["aab"])
    assert ("".join(shown), text.stopped) == ("a", "aab")


def test_a_stop_string_of_replacement_characters_at_the_end() -> None:
    shown, text = stream(ByteTokenizer(), one_by_one(b"ab\xf0\x9f"), stop=["b\ufffd"])
    assert ("".join(shown), text.stopped) == ("a", "b\ufffd")


@pytest.mark.parametrize(
    ("stops", "want", "why"),
    [
        (["bc", "abc"], "x", "abc"),  # complete at once: the longest
        (["abcd", "bc"], "xa", "bc"),  # complete first, though another began before
        (["c", "b"], "xa", "b"),
    ],
)
def test_which_of_several_stop_strings_wins(stops: list[str], want: str, why: str) -> None:
    for groups in ([list(b"xabcde")], one_by_one("xabcde"), [list(b"xab"), list(b"cde")]):
        shown, text = stream(ByteTokenizer(), groups, stop=stops)
        assert ("".join(shown), text.stopped) == (want, why)


@given(
    data=st.lists(st.sampled_from([*b"abc", 0xE6, 0xBB, 0x91, 0xF0, 0x9F, 0xFF, 256, 257]), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stop=st.lists(st.text("abc滑\ufffd", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_any_grouping_gives_the_decoded_text_up_to_the_first_stop(
    data: list[int], cuts: list[int], stop: list[str], include: bool
) -> None:
    tokenizer = ByteTokenizer([b"<eos>", b"ab\xe6"], special=[256])
    edges = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    groups = [data[a:b] for a, b in pairwise(edges)]
    shown, text = stream(tokenizer, groups, stop=stop, include_stop=include)
    whole = tokenizer.decode(data)
    found = [(whole.find(s) + len(s), whole.find(s), s) for s in stop if s in whole]
    end, start, why = min(found, default=(len(whole), len(whole), None))
    assert "".join(shown) == text.text == whole[: end if include else start]
    assert text.stopped == why


def test_time_per_token_does_not_grow() -> None:
    tokenizer = ByteTokenizer([b"word "])
    text = IncrementalText(tokenizer, stop=["never", "w" * 50])
    spent = []
    for _ in range(2):
        start = time.process_time()
        for _ in range(20_000):
            text.push([256])
        spent.append(time.process_time() - start)
    assert spent[1] < 3 * spent[0]
    assert len(text.text) + len(text.finish()) == 200_000


def test_a_checker_without_stop_strings_holds_nothing_back() -> None:
    checker = StopChecker(["", ""])
    assert (checker.push("abc"), checker.finish(), checker.stopped) == ("abc", "", None)
