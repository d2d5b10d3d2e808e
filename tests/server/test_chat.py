"""/v1/chat/completions and /tokenize: templates, fields, shapes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from tests.server.apps import CHAT, chat, fake_engine, post, refusal, saying, stream
from tests.server.fake import FakeEngine
from tests.text.fakes import ByteTokenizer

from sash.server import prompts
from sash.server.protocol.chat import ChatChunk, ChatCompletion
from sash.text.chat import PLAIN_STOPS

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<bot{{ mood }}>{% endif %}"
)


def templated(template: str | None = TEMPLATE) -> FakeEngine:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    return fake_engine(tokenizer=tokenizer)


def prompt_of(engine: FakeEngine, messages: list[dict[str, object]] | None = None, **body: object) -> str:
    chat(engine, **({"messages": messages} if messages else {}), **body)
    return bytes(engine.prompts[-1]).decode()


def say(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def test_the_answer_has_openais_shape() -> None:
    answer = chat(saying(b"yes", reason="length"), max_tokens=3)
    TypeAdapter(ChatCompletion).validate_python(answer, strict=True)
    assert answer.pop("id").startswith("chatcmpl-") and answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 3,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_models_template_is_used_then_the_servers_then_a_plain_one(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("OWN {{ messages[0].content }}")
    assert prompt_of(templated()) == "<user>hi</><bot>"
    assert prompt_of(templated(None)) == "user: hi\nassistant:"
    engine = templated()
    post(PATH, CHAT, engine, chat_template=file)
    assert bytes(engine.prompts[0]) == b"OWN hi"


def test_an_answer_in_the_plain_template_ends_where_a_next_turn_would_begin() -> None:
    bare, own = templated(None), templated()
    chat(bare, stop="END")
    chat(bare, ignore_eos=True)
    chat(bare, include_stop_str_in_output=True)
    chat(bare, structured_outputs={"regex": "user: a"})
    chat(own)
    post("/v1/responses", {"input": "hi"}, bare)
    assert [params.stop for params in bare.params] == [("END", *PLAIN_STOPS), (), (), (), PLAIN_STOPS]
    assert own.params[0].stop == ()


def test_a_request_brings_a_template_only_where_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    body = CHAT | {"chat_template": "MINE"}
    error = refusal(PATH, body)
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    engine = templated()
    assert post(PATH, body, engine, trust_request_chat_template=True).status_code == 200
    assert bytes(engine.prompts[0]) == b"MINE"
    rendered = []
    monkeypatch.setattr(prompts, "render_chat", lambda *_, **__: rendered.append(threading.current_thread()) or "x")
    post(PATH, body, engine, trust_request_chat_template=True)
    post(PATH, CHAT, engine)
    assert [thread is threading.main_thread() for thread in rendered] == [False, True], "its own never on the loop"
    monkeypatch.setattr(prompts, "_TEMPLATES", threading.BoundedSemaphore(1))
    prompts._TEMPLATES.acquire()
    error = refusal(PATH, body, status=503, trust_request_chat_template=True)
    assert error["param"] == "chat_template" and error["code"] == "templates_busy"
    assert post(PATH, CHAT, engine).status_code == 200, "others don't wait for it"
    prompts._TEMPLATES.release()
    assert post(PATH, body, engine, trust_request_chat_template=True).status_code == 200
    monkeypatch.undo()
    broken = CHAT | {"chat_template": "{% for %}"}
    assert refusal(PATH, broken, trust_request_chat_template=True)["param"] == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(source: str) -> None:
    refusal(PATH, CHAT | {"chat_template": source}, trust_request_chat_template=True)


def test_what_users_write_is_no_template() -> None:
    assert prompt_of(templated(), [say("user", "{{ 7 * 7 }}{% include 'x' %}")]).startswith("<user>{{ 7 * 7 }}{%")


def test_template_names_come_from_the_request() -> None:
    assert prompt_of(templated(), chat_template_kwargs={"mood": "!"}) == "<user>hi</><bot!>"
    for name in ("tokenizer", "template", "messages", "add_generation_prompt"):
        error = refusal(PATH, CHAT | {"chat_template_kwargs": {name: 1}})
        assert error["param"] == "chat_template_kwargs"


def test_an_answer_may_be_begun_by_the_client() -> None:
    talk = [say("user", "hi"), say("assistant", "Well, ")]
    assert prompt_of(templated(), talk, continue_final_message=True) == "<user>hi</><assistant>Well, "
    assert prompt_of(templated(), talk, add_generation_prompt=False).endswith("<assistant>Well,</>")
    spaced = [say("user", "hi\n"), say("assistant", " Well,  \n ")]
    assert prompt_of(templated(None), spaced, continue_final_message=True) == "user: hi\nassistant: Well,  \n "
    assert prompt_of(templated(None), spaced) == "user: hi\nassistant: Well,\nassistant:"
    both = {"messages": talk, "continue_final_message": True, "add_generation_prompt": True}
    assert refusal(PATH, both)["param"] == "continue_final_message"
    missing = templated("{{ messages[0].content }}")
    assert (
        refusal(PATH, {"messages": talk, "continue_final_message": True}, missing)["param"] == "continue_final_message"
    )
    parts = [say("assistant", [{"type": "text", "text": "a"}])]
    assert refusal(PATH, {"messages": parts, "continue_final_message": True})["param"] == "continue_final_message"


def test_messages_may_be_parts_of_text_and_nothing_else() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of(templated(), [say("user", parts)]) == "<user>ab</><bot>"
    picture = [say("user", [{"type": "image_url", "image_url": {"url": "http://x"}}])]
    assert refusal(PATH, {"messages": picture})["param"] == "messages"


def test_messages_that_the_template_refuses_are_told() -> None:
    engine = templated("{{ raise_exception('roles must alternate') }}")
    error = refusal(PATH, CHAT, engine)
    assert error["param"] == "messages" and "roles must alternate" in error["message"]
    assert refusal(PATH, CHAT, templated("{# nothing #}"))["param"] == "messages"


def test_a_message_without_content_has_an_empty_one_and_keeps_its_other_fields() -> None:
    engine = templated("{{ messages[0].content ~ messages[0].tool_calls[0].id }}")
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert prompt_of(engine, [say("assistant", None, tool_calls=calls)]) == "c1"


def test_developers_are_system_where_the_template_knows_none() -> None:
    assert prompt_of(templated(), [say("developer", "a")]).startswith("<system>a")
    assert prompt_of(templated(TEMPLATE + "{# developer #}"), [say("developer", "a")]).startswith("<developer>a")


def test_long_conversations_are_worked_on_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    calls = []
    original = asyncio.to_thread

    async def noted(work: object, *args: object) -> object:
        calls.append(work)
        return await original(work, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "to_thread", noted)
    prompt_of(templated(), [say("user", "short")])
    assert not calls
    long = "long " * 1000
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    for message, more in (
        (say("user", long), {}),
        (say("user", "short", name=long), {}),
        (say("user", "short"), {"tools": [tool]}),
        (say("user", "short"), {"chat_template_kwargs": {"mood": long}}),
    ):
        calls.clear()
        prompt_of(templated(), [message], truncate_prompt_tokens=9, **more)
        assert len(calls) == 1


def test_length_is_what_is_asked_for_by_either_name_or_what_there_is() -> None:
    engine = saying(b"a")
    chat(engine)
    chat(engine, max_tokens=5)
    chat(engine, max_tokens=5, max_completion_tokens=7)
    assert [p.max_tokens for p in engine.params] == [None, 5, 7]


def test_scores_have_openais_shape() -> None:
    answer = chat(saying("é!".encode()), logprobs=True, top_logprobs=2)
    first, _, last = answer["choices"][0]["logprobs"]["content"]
    assert answer["choices"][0]["message"]["content"] == "é!"
    assert first["token"] == "\\xc3" and first["bytes"] == [0xC3]
    assert last == {
        "token": "!",
        "logprob": -0.5,
        "bytes": [33],
        "top_logprobs": [
            {"token": "!", "logprob": -0.5, "bytes": [33]},
            {"token": "(", "logprob": -1.5, "bytes": [40]},
        ],
    }
    bare = chat(saying(b"!"), logprobs=True)["choices"][0]["logprobs"]
    assert bare["content"][0]["top_logprobs"] == [] and bare["refusal"] is None
    assert chat(saying(b"!"), logprobs=False)["choices"][0]["logprobs"] is None
    assert refusal(PATH, CHAT | {"top_logprobs": 2})["param"] == "top_logprobs"


def test_prompt_scores_and_ids_have_vllms_shape() -> None:
    engine = templated("AB")
    answer = chat(engine, prompt_logprobs=0, return_token_ids=True, max_tokens=1)
    assert answer["prompt_logprobs"] == [None, {"66": {"logprob": -1.0, "rank": 1, "decoded_token": "B"}}]
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([65, 66], [33])
    body = CHAT | {"prompt_logprobs": 1, "stream": True}
    assert refusal(PATH, body)["param"] == "prompt_logprobs"


def test_a_stream_begins_with_the_role_and_ends_with_the_usage() -> None:
    chunks = stream(PATH, saying(b"ab"), stream_options={"include_usage": True})
    for chunk in chunks:
        TypeAdapter(ChatChunk).validate_python(chunk, strict=True)
    *parts, usage = chunks
    assert [c["choices"][0]["delta"] for c in parts] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": ""},
    ]
    assert [c["choices"][0]["finish_reason"] for c in parts] == [None, None, None, "stop"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1


def test_every_answer_of_a_stream_begins_with_its_role() -> None:
    chunks = stream(PATH, saying(b"a", b"b"), n=2, return_token_ids=True)
    roles = [c for c in chunks if "role" in c["choices"][0]["delta"]]
    assert [c["choices"][0]["index"] for c in roles] == [0, 1]
    assert all(c["prompt_token_ids"] for c in roles)
    assert [c["choices"][0]["token_ids"] for c in chunks if c not in roles] == [[97], [98], [], []]


@pytest.mark.parametrize("field", ["audio", "functions", "echo", "use_beam_search"])
def test_what_is_known_and_can_not_be_done_is_refused(field: str) -> None:
    assert refusal(PATH, CHAT | {field: [{"a": 1}]})["param"] == field


def test_tokenize_and_detokenize_are_each_others_inverse() -> None:
    text = post("/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert text == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [72, 0xC3, 0xA9],
        "token_strs": ["H", "\\xc3", "\\xa9"],
    }
    assert post("/detokenize", {"tokens": text["tokens"]}).json() == {"prompt": "Hé"}
    engine = templated()
    talk = post("/tokenize", CHAT | {"chat_template_kwargs": {"mood": "?"}, "model": "tiny"}, engine).json()
    assert bytes(talk["tokens"]) == b"<user>hi</><bot?>" and talk["token_strs"] is None
    assert post("/tokenize", {"prompt": ""}).json()["count"] == 0
    assert post("/tokenize", {"prompt": "a", "x": 1}).headers["x-sash-ignored"] == "x"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": CHAT["messages"]}, {"prompt": 5}, {"messages": []}])
def test_tokenize_wants_one_text_or_one_conversation(body: dict[str, object]) -> None:
    assert refusal("/tokenize", body)["param"] in ("prompt", "messages")


def test_detokenize_wants_ids() -> None:
    for wrong in ("a", [1.5], [-1], None):
        assert refusal("/detokenize", {"tokens": wrong})["param"] == "tokens"
    assert refusal("/detokenize", {"tokens": [1], "model": "x"}, status=404)["param"] == "model"
    assert refusal("/tokenize", {"prompt": "a", "model": "x"}, status=404)["param"] == "model"
