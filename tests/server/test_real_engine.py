"""The server in front of a real core on a tiny model says what the offline engine says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tests.engine.conftest import OPTIONS, save_tokenizer
from tests.families import build
from tests.server.apps import Json, events

from sash import LLM, SamplingParams
from sash.engine.async_engine import AsyncEngine
from sash.server.app import create_app
from sash.server.settings import ServerSettings
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.text.load import load_tokenizer

PROMPTS = ["One text", "Another, longer one", "x"]
SAMPLED: Json = {"n": 2, "seed": 3, "max_tokens": 9, "logprobs": 2, "logit_bias": {"40": 2.0}, "ignore_eos": True}
STOPPED: Json = {"seed": 5, "max_tokens": 20, "stop": ["e", "a"], "min_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    _, path = build("gemma3", tmp_path_factory.mktemp("tiny"))
    save_tokenizer(path)
    yield path
    torch.set_num_threads(before)


def params_of(body: Json) -> SamplingParams:
    bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
    return SamplingParams(**(body | {"logit_bias": bias}))


def test_answers_are_those_of_the_offline_engine(folder: Path) -> None:
    llm = LLM(folder, **OPTIONS)
    wanted = [llm.generate(PROMPTS, params_of(body)) for body in (SAMPLED, STOPPED)]
    source = locate(folder)
    engine = AsyncEngine(str(folder), OPTIONS, load_spec(source), load_tokenizer(source.path), max_waiting=3)

    async def whole() -> None:
        app = create_app(engine, ServerSettings("tiny"))
        try:
            await engine.start()
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sash") as client:
                for body, outputs in zip((SAMPLED, STOPPED), wanted, strict=True):
                    await check(client, body | {"prompt": PROMPTS, "return_token_ids": True}, outputs)
                scored = await client.post(
                    "/v1/completions", json={"prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 1}
                )
                check_scores(scored.json(), llm)
                assert (await engine.report()).running == engine.num_open == 0
                refused = await client.post("/v1/completions", json={"prompt": [101]})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
        finally:
            await engine.close()

    asyncio.run(whole())


async def check(client: httpx.AsyncClient, body: Json, outputs: list) -> None:
    whole = (await client.post("/v1/completions", json=body)).json()
    chunks = events((await client.post("/v1/completions", json=body | {"stream": True})).text)
    answers = [output for request in outputs for output in request.outputs]
    for i, answer in enumerate(answers):
        choice = whole["choices"][i]
        assert (choice["text"], choice["token_ids"]) == (answer.text, answer.token_ids)
        assert (choice["finish_reason"], choice["stop_reason"]) == (answer.finish_reason, answer.stop_reason)
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        assert "".join(p["text"] for p in parts) == answer.text
        assert [t for p in parts for t in p["token_ids"]] == answer.token_ids
        if answer.logprobs is not None:
            own = [p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids, strict=True)]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(own)
            assert [v for p in parts for v in p["logprobs"]["token_logprobs"]] == pytest.approx(own)


def check_scores(answer: Json, llm: LLM) -> None:
    for choice, request in zip(
        answer["choices"],
        llm.generate(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=1)),
        strict=True,
    ):
        assert request.prompt_logprobs is not None
        own = [
            None if p is None else pytest.approx(p[t].logprob)
            for p, t in zip(request.prompt_logprobs, request.prompt_token_ids, strict=True)
        ]
        assert choice["logprobs"]["token_logprobs"] == own and own[0] is None and len(own) > 1
