"""A stream, put together, is the whole answer: texts, scores, endings and usage, wherever tokens split characters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st
from tests.server.apps import CHAT, Json, events, fake_engine
from tests.server.fake import FakeEngine
from tests.text.fakes import ByteTokenizer

from sash.server.app import create_app
from sash.server.settings import ServerSettings

# Tokens of several bytes: words, the halves of an emoji, a stop string's parts, a control token, no UTF-8 at all.
EXTRA = [b"the", b" END", b"EN", b"D!", b"\xf0\x9f", b"\x98\x80", "日".encode(), b"<eos>", b"\xff"]
TOKENIZER = ByteTokenizer(EXTRA, special=[263], strips_space=True)
TOKENS = st.one_of(st.integers(256, 264), st.sampled_from([*b"END! \n", 0xC3, 0xA9, 0xF0]))
# Mostly text: whole characters in one token or several, then anything.
RUNS = st.one_of(
    st.sampled_from([[260, 261], [0xC3, 0xA9], [256], [262], [258, 259], [10]]), st.lists(TOKENS, max_size=3)
)
TEXTS = st.lists(RUNS, max_size=6).map(lambda runs: [token for run in runs for token in run])
ANSWERS = st.lists(st.tuples(TEXTS, st.sampled_from(["stop", "length"])), min_size=6, max_size=6)
# One for all cases, whose engines take turns in it.
APP = create_app(fake_engine(), ServerSettings("tiny"))


@dataclass
class Case:
    """Answers by the order in which they are asked for, and a body."""

    answers: list[tuple[list[int], str]]
    body: Json
    prompts: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    body: Json = {
        "n": draw(st.integers(1, 3)),
        "stop": draw(st.sampled_from([None, "END", ["END!", "D"], ["\n", "😀"]])),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
        "max_tokens": 60,
        "min_tokens": draw(st.sampled_from([None, 3])),
    }
    prompts = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=2))
    return Case(draw(ANSWERS), body, prompts)


def engine_of(case: Case) -> FakeEngine:
    started: list[Any] = []

    def script(message: Any, i: int) -> list[int | str]:
        if i == 0:
            started.append(message)
        tokens, reason = case.answers[(len(started) - 1) * 3 + i]
        return [*tokens, reason]

    return fake_engine(tokenizer=TOKENIZER, script=script)


def both(path: str, case: Case, body: Json) -> tuple[Json, list[Json]]:
    """The answer as a whole and as chunks."""

    async def whole() -> tuple[Json, list[Json]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://sash") as client:
            APP.state.server.engine = engine_of(case)
            first = await client.post(path, json=body)
            APP.state.server.engine = engine_of(case)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            second = await client.post(path, json=body | options)
        assert first.status_code == second.status_code == 200, (first.text, second.text)
        return first.json(), events(second.text)

    return asyncio.run(whole())


def check_common(whole: Json, chunks: list[Json]) -> None:
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    ended = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
    assert {(c["index"], c["finish_reason"], c["stop_reason"]) for c in ended} == {
        (c["index"], c["finish_reason"], c["stop_reason"]) for c in whole["choices"]
    }
    assert len(ended) == len(whole["choices"])


def pieces(chunks: list[Json], index: int) -> list[Json]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


@given(cases(), st.sampled_from([None, 0, 2]), st.booleans())
def test_completions(case: Case, logprobs: int | None, echo: bool) -> None:
    body = case.body | {"prompt": case.prompts, "logprobs": logprobs, "echo": echo}
    whole, chunks = both("/v1/completions", case, body)
    check_common(whole, chunks)
    for choice in whole["choices"]:
        parts = pieces(chunks, choice["index"])
        assert "".join(p["text"] for p in parts) == choice["text"]
        if case.body["return_token_ids"]:
            assert [t for p in parts for t in p["token_ids"]] == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        if logprobs is None:
            assert choice["logprobs"] is None and all(p["logprobs"] is None for p in parts)
            continue
        for name, values in choice["logprobs"].items():
            assert [value for p in parts for value in p["logprobs"][name]] == values
        tokens = len(choice["logprobs"]["tokens"])
        assert tokens == len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["text_offset"])
        check_offsets(choice, stopped=isinstance(choice["stop_reason"], str))


def check_offsets(choice: Json, *, stopped: bool) -> None:
    """Where a token is whole characters and the text wasn't cut, its text stands at its offset."""
    scores, text = choice["logprobs"], choice["text"]
    assert scores["text_offset"] == sorted(scores["text_offset"])
    if stopped or "\ufffd" in text:
        return
    for name, offset in list(zip(scores["tokens"], scores["text_offset"], strict=True))[1:]:
        if not name.startswith("bytes:") and name != "<eos>":
            assert text[offset : offset + len(name)] == name


@given(cases(), st.sampled_from([None, 0, 2]))
def test_chat(case: Case, top: int | None) -> None:
    body = CHAT | case.body | ({} if top is None else {"logprobs": True, "top_logprobs": top})
    whole, chunks = both("/v1/chat/completions", case, body)
    check_common(whole, chunks)
    for choice in whole["choices"]:
        parts = pieces(chunks, choice["index"])
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in p["delta"] for p in parts[1:])
        assert "".join(p["delta"]["content"] for p in parts) == choice["message"]["content"]
        if case.body["return_token_ids"]:
            assert [t for p in parts for t in p.get("token_ids", ())] == choice["token_ids"]
        found = [entry for p in parts if p["logprobs"] for entry in p["logprobs"]["content"]]
        assert found == (choice["logprobs"]["content"] if choice["logprobs"] else [])
        assert "\ufffd" not in choice["message"]["content"] or not all(map(is_text, case.answers))


def is_text(answer: tuple[list[int], str]) -> bool:
    """Whether the bytes of an answer are whole characters."""
    try:
        b"".join(TOKENIZER.token_bytes(t) for t in answer[0] if t != 263).decode()
    except UnicodeDecodeError:
        return False
    return True
