"""The core in a process of its own: the same answers, cancelling, refusals, overload, and a core that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.engine.conftest import OPTIONS

from sash import LLM, SamplingParams
from sash.engine.async_engine import AsyncEngine
from sash.engine.messages import CancelRequest, GetReport
from sash.engine.wire import FrameReader, frame
from sash.spec.errors import ConfigError, EngineDeadError, EngineStoppedError, ModelError, OverloadedError, RequestError
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.spec.structured import StructuredOutputs
from sash.text.load import load_tokenizer

LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
Test = Callable[[AsyncEngine], Awaitable[None]]


def make(folder: Path, **options: object) -> AsyncEngine:
    source = locate(folder)
    return AsyncEngine(str(folder), OPTIONS | options, load_spec(source), load_tokenizer(source.path), max_waiting=3)


@asynccontextmanager
async def running(folder: Path, **options: object) -> AsyncIterator[AsyncEngine]:
    engine = make(folder, **options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def run(folder: Path) -> Callable[[Test], None]:
    """Runs a test against an engine whose books must be empty afterwards, if it still lives."""

    def go(test: Test) -> None:
        async def whole() -> None:
            async with running(folder) as engine:
                await test(engine)
                if engine.alive:
                    report = await engine.report()
                    assert report.running == report.waiting == engine.num_open == 0
                    assert all(pool.free_pages == pool.num_pages for pool in report.pools)

        asyncio.run(whole())

    return go


def test_answers_are_those_of_the_offline_engine(run: Callable[[Test], None], llm: LLM) -> None:
    prompts = ["One text", "Another, longer one", [5, 6, 7]]
    params = [
        SamplingParams(n=2, seed=3, max_tokens=9, logprobs=2, prompt_logprobs=1, logit_bias={40: 2.0}),
        SamplingParams(seed=-4, max_tokens=20, stop=["e", "a"], min_tokens=2),
        SamplingParams(temperature=0, max_tokens=6),
    ]
    wanted = llm.generate(prompts, params)

    async def test(engine: AsyncEngine) -> None:
        async def one(i: int) -> None:
            async with engine.submit(prompts[i], params[i]) as submission:
                got = await submission.finished()
            assert (got.outputs, got.prompt_logprobs) == (wanted[i].outputs, wanted[i].prompt_logprobs)

        await asyncio.gather(*(one(i) for i in range(3)))

    run(test)


def test_deltas_add_up_and_leaving_early_frees_every_page(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with engine.submit("Hello", LONG) as submission:
            deltas = [delta async for batch in submission.deltas() for delta in batch]
        assert "".join(d.outputs[0].text for d in deltas) == submission.whole.outputs[0].text
        assert len(deltas) > 5 and deltas[-1].outputs[0].finish_reason == "length"
        async with engine.submit("Hello", LONG) as submission:
            async for _ in submission.deltas():
                break

    run(test)


def test_what_can_never_run_is_refused_with_the_reason(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="max_model_len is 64"):
            async with engine.submit([5] * 64, LONG):
                pass
        with pytest.raises(RequestError, match="prompt has token id 101"):
            async with engine.submit([101], LONG):
                pass

    run(test)


def test_a_request_whose_grammar_is_compiled_holds_up_nobody_and_may_be_cancelled(run: Callable[[Test], None]) -> None:
    slow = StructuredOutputs(json={"type": "integer", "multipleOf": 99999989})

    async def test(engine: AsyncEngine) -> None:
        async def submit_slow() -> None:
            async with engine.submit("Hello", SamplingParams(structured_outputs=slow)):
                raise AssertionError("it can't be compiled")

        waiting, left = asyncio.create_task(submit_slow()), asyncio.create_task(submit_slow())
        await asyncio.sleep(0.01)
        for _ in range(3):
            async with engine.submit("Hello", LONG) as submission:
                assert len((await submission.finished()).outputs[0].token_ids) == 50
        assert not waiting.done() and engine.num_open == 2
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert engine.num_open == 1
        form = SamplingParams(n=2, structured_outputs=StructuredOutputs(regex="[ab]{3}"), seed=2)
        async with engine.submit("Hello", form) as submission:
            outputs = (await submission.finished()).outputs
        assert all(set(o.text) <= {"a", "b"} and (len(o.text), o.finish_reason) == (3, "stop") for o in outputs)
        with pytest.raises(RequestError, match="structured_outputs json can't be used: it takes more time"):
            await waiting

    run(test)


def test_a_grammar_is_refused_although_nothing_else_runs(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        for wrong in ("(", "(?=a)"):
            with pytest.raises(RequestError, match="structured_outputs regex can't be used"):
                async with engine.submit("Hello", SamplingParams(structured_outputs=StructuredOutputs(regex=wrong))):
                    pass

    run(test)


def test_more_than_may_wait_is_turned_away(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="n=8 is more than the 7 answers"):
            async with engine.submit("Hello", SamplingParams(n=8)):
                pass
        async with engine.submit("Hello", SamplingParams(n=7, max_tokens=40, ignore_eos=True)):
            with pytest.raises(OverloadedError) as caught:
                async with engine.submit("Hello", LONG):
                    pass
            assert 1 <= caught.value.retry_after_s <= 60

    run(test)


def test_a_core_that_dies_is_told_to_all_who_wait_and_may_start_again(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with engine.submit("Hello", LONG) as first:
            assert engine.pid is not None and engine.starts == 1
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="send it again"):
                await asyncio.wait_for(first.finished(), 20)
        assert "ended" in await engine.ended() and not engine.alive
        with pytest.raises(EngineDeadError):
            async with engine.submit("Hello", LONG):
                pass
        with pytest.raises(EngineDeadError):
            await engine.report()
        await engine.start()
        assert engine.starts == 2
        async with engine.submit("Hello", LONG) as again:
            assert len((await again.finished()).outputs[0].token_ids) == 50

    run(test)


def test_an_engine_that_is_told_to_end_has_not_failed(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with engine.submit([5, 6], LONG) as submission:
            closing = asyncio.create_task(engine.close())
            with pytest.raises(EngineStoppedError, match="stopped before the answer was done"):
                await submission.finished()
            await closing
        with pytest.raises(EngineStoppedError):
            async with engine.submit([5], LONG):
                pass
        await engine.start()
        os.kill(engine.pid or 0, signal.SIGKILL)
        await engine.ended()
        await engine.close()
        with pytest.raises(EngineDeadError, match="not running") as error:
            async with engine.submit([5], LONG):
                pass
        assert not isinstance(error.value, EngineStoppedError)

    run(test)


def test_a_core_that_is_started_again_takes_nothing_before_it_has_loaded(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await engine.ended()
        await engine.close()
        again = asyncio.create_task(engine.start())
        while engine.starts < 2:
            assert not engine.alive
            await asyncio.sleep(0)
        assert not engine.alive and not again.done()
        with pytest.raises(EngineDeadError, match="not running"):
            async with engine.submit("Hello", LONG):
                pass
        await again
        assert engine.alive

    run(test)


def test_the_end_of_a_core_before_is_no_end_of_the_next(run: Callable[[Test], None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        before = engine._link
        assert before is not None
        await engine.close()
        again = asyncio.create_task(engine.start())
        while engine.starts < 2:
            await asyncio.sleep(0)
        before.connection_lost(None)  # as it comes where the loop hears of a process before it hears of its socket
        await again
        assert engine.alive

    run(test)


def test_a_core_that_can_not_be_started_now_may_be_started_later(
    run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*command: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    async def test(engine: AsyncEngine) -> None:
        await engine.close()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", fail)
            with pytest.raises(EngineDeadError, match="Cannot allocate memory"):
                await engine.start()
        assert "Cannot allocate memory" in await engine.ended()
        await engine.close()
        await engine.start()

    run(test)


def test_a_core_goes_when_its_client_has_gone(folder: Path) -> None:
    async def whole() -> int | None:
        engine = make(folder)
        await engine.start()
        assert engine._link is not None and engine._process is not None
        engine._link.close()
        return await asyncio.wait_for(engine._process.wait(), 20)

    assert asyncio.run(whole()) == 0


@pytest.mark.parametrize(
    ("options", "error"), [({"page_size": 0}, "page_size"), ({"no_such_option": 1}, "unknown option 'no_such_option'")]
)
def test_options_that_can_not_work_are_refused_at_start(folder: Path, options: dict[str, object], error: str) -> None:
    async def whole() -> None:
        async with running(folder, **options):
            pass

    with pytest.raises(ConfigError, match=error):
        asyncio.run(whole())


def test_a_broken_model_is_told(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    async def whole() -> None:
        async with running(tmp_path):
            pass

    with pytest.raises(ModelError):
        asyncio.run(whole())


def test_frames_survive_any_cut() -> None:
    messages = [CancelRequest("1.0"), GetReport(7, True)]
    data = frame(messages) + frame([]) + frame(messages[:1])
    for size in range(1, len(data) + 1):
        reader = FrameReader()
        got = [m for i in range(0, len(data), size) for m in reader.feed(data[i : i + size])]
        assert got == [*messages, messages[0]]
    with pytest.raises(ValueError, match="no frame"):
        FrameReader().feed(b"\xff\xff\xff\xff")
