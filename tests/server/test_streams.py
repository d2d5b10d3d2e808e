"""Streams and work under way: refusals, errors, clients that leave or don't read, silence, time limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.server.apps import CHAT, client_of, events, fake_engine, logged, post, refusal, saying, stream
from tests.server.fake import FakeEngine
from tests.server.raw import RawCall

from sash.server.middleware import CLIENT_GONE
from sash.spec.errors import EngineStoppedError

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
HOW = pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return (CHAT if path == CHATS else {"prompt": "Hi"}) | more


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(whole())


@PATHS
@HOW
def test_refusals_are_plain_errors(path: str, streamed: bool) -> None:
    body = body_of(path, stream=streamed)
    assert "too long" in refusal(path, body, fake_engine(refuse="prompt is too long"))["message"]
    busy = post(path, body, fake_engine(overloaded=True))
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "7")
    assert busy.json()["error"]["type"] == "rate_limit_error"
    assert post(path, body, fake_engine(die_after=0)).status_code == 500
    loading = post(path, body, fake_engine(alive=False, info=None))
    assert (loading.status_code, loading.json()["error"]["code"]) == (503, "not_ready")
    assert post(path, body, fake_engine(alive=False)).status_code == 503


@PATHS
def test_an_engine_that_dies_ends_a_stream_with_an_error(path: str) -> None:
    answer = post(path, body_of(path, stream=True), saying(b"abc", die_after=2))
    *_, last = events(answer.text)
    assert answer.status_code == 200
    assert last["error"]["code"] == "engine_dead" and "send it again" in last["error"]["message"]


@PATHS
@HOW
def test_an_engine_that_is_stopped_is_no_failure(path: str, streamed: bool) -> None:
    engine = saying(b"abc", die_after=2, dies_of=EngineStoppedError("stopped"))
    with logged() as lines:
        answer = post(path, body_of(path, stream=streamed), engine)
    error = events(answer.text)[-1]["error"] if streamed else answer.json()["error"]
    assert (error["code"], error["type"]) == ("draining", "service_unavailable_error")
    assert "shut down before the answer was done; send it again" in error["message"]
    assert streamed or (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert next(line for line in lines if line["event"] == "request")["error"] == "draining"


@PATHS
def test_a_request_that_fails_is_told_without_internals(path: str) -> None:
    whole = post(path, body_of(path), saying(b"abc", reason="error"))
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "generation_failed")
    with logged() as lines:
        chunks = stream(path, saying(b"abc", reason="error"))
    assert chunks[-1]["error"]["code"] == "generation_failed" and "scripted" not in json.dumps(chunks)
    assert any(line.get("error") == "scripted" for line in lines)
    assert next(line for line in lines if line["event"] == "request")["error"] == "generation_failed"


@PATHS
def test_a_time_limit_is_an_error_or_where_text_was_sent_a_reason(path: str) -> None:
    assert post(path, body_of(path), saying(b"abc", reason="timeout")).status_code == 504
    assert post(path, body_of(path, stream=True), saying(b"", reason="timeout")).status_code == 504
    assert stream(path, saying(b"abc", reason="timeout"))[-1]["choices"][0]["finish_reason"] == "timeout"
    assert post(path, body_of(path), saying(b"abc", reason="cancelled")).status_code == 503


@PATHS
def test_a_defect_ends_a_stream_with_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = saying(b"ab")
    take = engine.frontend.take

    def broken(update: Any) -> Any:
        if update.finish_reason:
            update = update.__class__(update.answer_id, (1 << 40,), finish_reason=object())
        return take(update)

    monkeypatch.setattr(engine.frontend, "take", broken)
    with logged() as lines:
        answer = post(path, body_of(path, stream=True), engine)
    assert events(answer.text)[-1]["error"]["code"] == "internal_error"
    assert any(line["event"] == "stream_failed" for line in lines)


@PATHS
@HOW
def test_a_client_that_leaves_ends_its_work_at_once(path: str, streamed: bool) -> None:
    async def test() -> None:
        engine = fake_engine(delay_s=0.01)
        call = RawCall(engine, path, body_of(path, stream=streamed, max_tokens=500, n=2))
        while len(engine.frontend._by_answer) < 2:
            await asyncio.sleep(0)
        if streamed:
            await call.until("!")
        call.leave()
        with logged() as lines:
            await call.end()
        assert engine.cancelled == ["0.0", "0.1"] and engine.num_open == 0
        assert not call.ended and lines[-1]["client_gone"]
        assert lines[-1]["status"] == (200 if streamed else CLIENT_GONE)
        assert len(asyncio.all_tasks()) == 1

    run(test)


@PATHS
@HOW
def test_a_client_may_leave_while_nothing_is_said(path: str, streamed: bool) -> None:
    async def test() -> None:
        engine = fake_engine(delay_s=60)
        call = RawCall(engine, path, body_of(path, stream=streamed))
        while not engine.num_open:
            await asyncio.sleep(0)
        call.leave()
        await call.end()
        assert engine.cancelled == ["0.0"] and call.status is None
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run(test)


def test_a_client_may_leave_while_its_body_comes() -> None:
    async def test() -> None:
        engine = fake_engine()
        call = RawCall(engine, COMPLETIONS, {})
        call._incoming = [{"type": "http.request", "body": b"{", "more_body": True}]
        call.leave()
        await call.end()
        assert call.status is None and not engine.prompts

    run(test)


def test_a_stream_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def test() -> None:
        engine = fake_engine(delay_s=60)
        call = RawCall(engine, CHATS, body_of(CHATS, stream=True))
        while not engine.num_open:
            await asyncio.sleep(0)
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.end()
        assert engine.cancelled == ["0.0"]

    run(test)


def test_text_comes_while_it_is_made_and_what_is_ready_comes_together() -> None:
    async def test() -> None:
        call = RawCall(fake_engine(delay_s=0.001), COMPLETIONS, body_of(COMPLETIONS, stream=True, max_tokens=300))
        await call.until("!")
        assert not call.ended
        call.read.clear()
        await asyncio.sleep(0.05)
        waiting = len(call.parts)
        call.read.set()
        await call.end()
        assert call.ended and call.headers["content-type"].startswith("text/event-stream")
        assert call.headers["cache-control"] == "no-cache" and "content-length" not in call.headers
        # The one that was on its way, then one with all that had gathered behind it.
        assert max(part.count(b"data: ") for part in call.parts[waiting : waiting + 2]) > 5
        assert "".join(c["choices"][0]["text"] for c in events(call.text)) == "".join(
            chr(33 + i % 60) for i in range(300)
        )

    run(test)


def test_silence_is_filled_with_comments() -> None:
    async def test() -> None:
        engine = fake_engine(delay_s=0.1)
        call = RawCall(engine, CHATS, body_of(CHATS, stream=True, max_tokens=1), heartbeat_s=0.02)
        await call.until(": ")
        assert call.status == 200 and "data" not in call.text
        await call.end()
        assert call.text.count(": still there\n\n") >= 2
        assert [c["choices"][0]["delta"] for c in events(call.text)][1] == {"content": "!"}

    run(test)


def test_after_a_comment_a_refusal_is_an_event() -> None:
    async def test() -> None:
        engine = fake_engine(delay_s=0.1, script=lambda *_: ["timeout"])
        call = RawCall(engine, CHATS, body_of(CHATS, stream=True), heartbeat_s=0.02)
        await call.end()
        assert call.status == 200
        assert events(call.text)[-1]["error"]["code"] == "timeout"

    run(test)


def test_a_client_that_reads_nothing_is_given_up() -> None:
    async def test() -> None:
        engine = fake_engine(delay_s=0.001)
        call = RawCall(engine, CHATS, body_of(CHATS, stream=True), heartbeat_s=0.02, request_timeout_s=0.1)
        call.read.clear()
        with logged() as lines:
            await call.end()
        assert lines[-1]["client_gone"] and engine.num_open == 0

    run(test)


def test_a_comment_that_nobody_reads_is_given_up_too() -> None:
    async def test() -> None:
        engine = fake_engine(delay_s=60)
        call = RawCall(engine, CHATS, body_of(CHATS, stream=True), heartbeat_s=0.02, request_timeout_s=0.1)
        call.read.clear()
        await call.end()
        assert engine.cancelled == ["0.0"]

    run(test)


def many(seats: int, **options: Any) -> FakeEngine:
    """An engine with so many seats, which turns away what comes beyond."""
    from contextlib import asynccontextmanager

    from sash.spec.errors import OverloadedError

    engine = saying(b"ab", delay_s=0.001, **options)
    submit, most = engine.submit, [0]

    @asynccontextmanager
    async def guarded(prompt: Any, params: Any) -> Any:
        if engine.num_open + params.n > seats:
            raise OverloadedError("full", 1)
        async with submit(prompt, params) as submission:
            most[0] = max(most[0], engine.num_open)
            yield submission

    engine.submit = guarded  # type: ignore[method-assign]
    engine.most = most  # type: ignore[attr-defined]
    return engine


@HOW
def test_more_prompts_than_seats_take_turns(streamed: bool) -> None:
    engine = many(3)
    prompts = [[i] for i in range(1, 12)]
    body = {"prompt": prompts, "stream": streamed, "echo": True}
    answer = post(COMPLETIONS, body, engine)
    assert answer.status_code == 200, answer.text
    texts = [""] * 11
    for part in events(answer.text) if streamed else [answer.json()]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [f"{chr(i)}ab" for i in range(1, 12)]
    assert engine.most == [3]  # type: ignore[attr-defined]


def test_many_prompts_leave_the_queue_to_others() -> None:
    engine = many(1000)
    post(COMPLETIONS, {"prompt": [[i] for i in range(1, 40)]}, engine)
    assert engine.most == [2 * 4]  # type: ignore[attr-defined]
    assert [prompt[0] for prompt in engine.prompts] == list(range(1, 40))


@HOW
def test_prompts_that_find_no_seat_at_all_are_turned_away(streamed: bool) -> None:
    body = {"prompt": ["a", "b"], "stream": streamed}
    assert post(COMPLETIONS, body, many(0)).status_code == 429


def test_prompts_wait_while_others_have_all_seats() -> None:
    async def test() -> None:
        engine = many(1)
        async with client_of(engine) as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": ["a", "b"], "max_tokens": 5}))
            second = None
            for _ in range(1000):
                await asyncio.sleep(0.001)
                taken = await client.post(COMPLETIONS, json={"prompt": "c"})
                second = second or (taken if taken.status_code == 200 else None)
                if first.done():
                    break
            assert (await first).status_code == 200 and second is not None

    run(test)


@HOW
def test_one_prompt_that_is_refused_refuses_all(streamed: bool) -> None:
    from sash.spec.errors import RequestError

    engine = saying(b"a", delay_s=0.01)
    submit = engine.submit

    def picky(prompt: Any, params: Any) -> Any:
        if prompt == [66]:
            raise RequestError("prompt is odd")
        return submit(prompt, params)

    engine.submit = picky  # type: ignore[method-assign]
    error = refusal(COMPLETIONS, {"prompt": [[65], [66], [67]], "stream": streamed}, engine)
    assert error["message"] == "prompt 1: prompt is odd" and error["param"] == "prompt"
    assert sorted(engine.cancelled) == ["0.0", "1.0"]


@HOW
def test_an_engine_that_dies_fails_all_prompts(streamed: bool) -> None:
    answer = post(COMPLETIONS, {"prompt": ["a", "b"], "stream": streamed}, saying(b"abc", die_after=1))
    if streamed:
        assert events(answer.text)[-1]["error"]["code"] == "engine_dead"
    else:
        assert answer.status_code == 500


def test_a_client_that_leaves_ends_all_its_prompts() -> None:
    async def test() -> None:
        engine = many(2)
        engine.delay_s = 60
        call = RawCall(engine, COMPLETIONS, {"prompt": ["a", "b", "c", "d"]})
        while engine.num_open < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        call.leave()
        await call.end()
        assert engine.num_open == 0 and len(engine.prompts) == 2
        assert len(asyncio.all_tasks()) == 1

    run(test)
