"""/v1/completions: prompts in every form, its fields, its shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter
from tests.server.apps import complete, fake_engine, post, refusal, saying, stream
from tests.text.fakes import ByteTokenizer

from sash.server.protocol.completions import Completion
from sash.server.sampling import generation_defaults
from sash.spec.errors import ConfigError

PATH = "/v1/completions"
EMOJI = "é😀"


def test_the_answer_has_openais_shape() -> None:
    engine = saying(b"yes", reason="length")
    answer = complete(engine, max_tokens=3)
    assert answer.pop("id").startswith("cmpl-") and answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "yes", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert engine.prompts == [[72, 105]]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("", None),
        (["a", ""], None),
    ],
)
def test_prompts_come_in_four_forms(prompt: object, ids: list[list[int]] | None) -> None:
    engine = fake_engine()
    if ids is None:
        assert refusal(PATH, {"prompt": prompt}, engine)["param"] == "prompt"
        return
    answer = complete(engine, prompt=prompt, max_tokens=1)
    assert engine.prompts == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_choices_stand_in_the_order_of_prompts_and_answers() -> None:
    engine = saying(b"A", b"B")
    answer = complete(engine, prompt=["x", "y", "z"], n=2, echo=True)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(["xA", "xB", "yA", "yB", "zA", "zB"]))
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_fields_reach_the_sampler() -> None:
    engine = fake_engine()
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "seed": -1,
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "skip_special_tokens": False,
        "allowed_token_ids": [40, 41],
        "logprobs": 4,
        "prompt_logprobs": 3,
    }
    complete(engine, **fields, stop="\n\n", logit_bias={"40": 1, "41": -2.5}, bad_token_ids=[3], bad_words=[])
    params = engine.params[0]
    wanted = fields | {"seed": (1 << 64) - 1, "stop_token_ids": (5,), "allowed_token_ids": (40, 41)}
    assert {name: getattr(params, name) for name in wanted} == wanted
    assert (params.stop, params.logit_bias, params.bad_token_ids) == (("\n\n",), {40: 1.0, 41: -2.5}, (3,))


def test_what_is_not_given_is_vllms_default_and_the_models_own() -> None:
    engine = fake_engine()
    complete(engine)
    assert (engine.params[0].max_tokens, engine.params[0].temperature, engine.params[0].top_k) == (16, 1.0, 0)
    complete(engine, temperature=None, max_tokens=None, stop=None, seed=None, n=None, logit_bias=None, echo=None)
    assert engine.params[1] == engine.params[0]
    recommended = {"temperature": 0.6, "top_k": 20}
    post(PATH, {"prompt": "a"}, engine, default_sampling=recommended)
    post(PATH, {"prompt": "a", "temperature": 0}, engine, default_sampling=recommended)
    assert [(p.temperature, p.top_k) for p in engine.params[2:]] == [(0.6, 20), (0, 20)]


def test_a_models_folder_may_recommend_values(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == generation_defaults(tmp_path / "model.gguf") == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true, "eos_token_id": [1, 2]}')
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    file.write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p must be"):
        generation_defaults(tmp_path)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    engine = fake_engine()
    complete(engine, max_tokens=3.0, seed=7.0)
    assert (engine.params[0].max_tokens, engine.params[0].seed) == (3, 7)
    complete(engine, prompt=[97.0, 98], stop_token_ids=[5.0])
    assert engine.prompts[1] == [97, 98] and engine.params[1].stop_token_ids == (5,)
    assert refusal(PATH, {"prompt": "a", "max_tokens": 3.5})["param"] == "max_tokens"


def test_unknown_fields_are_ignored_and_told() -> None:
    body = {"prompt": "a", "user": "me", "metadata": {}, "store": True, "x\r\ny": 1, "ä": 2, "other": None}
    answer = post(PATH, body)
    assert answer.status_code == 200
    assert answer.headers["x-sash-ignored"] == "user, metadata, store, ..."
    assert "x-sash-ignored" not in post(PATH, {"prompt": "a"}).headers
    many = post(PATH, {"prompt": "a"} | {f"field{i}": 1 for i in range(500)})
    assert len(many.headers["x-sash-ignored"]) < 300
    pointless = post(PATH, {"prompt": "a", "stream_options": {"include_usage": True}})
    assert pointless.headers["x-sash-ignored"] == "stream_options"
    streamed = post(PATH, {"prompt": "a", "user": "me", "stream": True})
    assert streamed.headers["x-sash-ignored"] == "user"


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"use_beam_search": True}, {"prompt_embeds": "x"}])
def test_what_is_known_and_can_not_be_done_is_refused(field: dict[str, object]) -> None:
    error = refusal(PATH, {"prompt": "a"} | field)
    assert (error["param"], error["code"]) == (next(iter(field)), "unsupported_parameter")
    neutral = {name: None if isinstance(value, str) else False for name, value in field.items()}
    assert post(PATH, {"prompt": "a"} | neutral).status_code == 200


def test_words_of_one_token_are_banned_and_longer_ones_refused() -> None:
    engine = fake_engine(tokenizer=ByteTokenizer([b" a"]))
    engine.tokenizer.encode = lambda text, **_: [256] if text == " a" else list(text.encode())  # type: ignore[union-attr]
    complete(engine, bad_words=["a"], bad_token_ids=[9])
    assert engine.params[0].bad_token_ids == (9, 97, 256)
    assert "3 tokens" in refusal(PATH, {"prompt": "a", "bad_words": ["abc"]}, engine)["message"]


def test_only_served_models_may_be_named() -> None:
    error = refusal(PATH, {"prompt": "a", "model": "gpt-4"}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found") and "tiny" in error["message"]
    named = post(PATH, {"prompt": "a", "model": "alias"}, served_model_names=("alias",))
    assert named.json()["model"] == "alias"


def test_best_of_may_be_n() -> None:
    assert len(complete(fake_engine(), n=2, best_of=2)["choices"]) == 2


def test_prompts_are_limited_in_number() -> None:
    assert "at most 2" in refusal(PATH, {"prompt": ["a", "b", "c"]}, max_prompts=2)["message"]


@pytest.mark.parametrize(
    ("keep", "max_tokens", "ids"), [(2, None, [4, 5]), (9, None, [3, 4, 5]), (-1, 510, [4, 5]), (-1, None, [3, 4, 5])]
)
def test_prompts_may_be_cut_from_the_left(keep: int, max_tokens: int | None, ids: list[int]) -> None:
    engine = fake_engine()
    complete(engine, prompt=[3, 4, 5], truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert engine.prompts == [ids]
    assert refusal(PATH, {"prompt": [5] * 512})["code"] == "context_length_exceeded"
    assert refusal(PATH, {"prompt": ["a", "a" * 512]})["param"] == "prompt"
    complete(engine, prompt=[5] * 512, max_tokens=0, echo=True)
    for nothing in (0, -1):
        body = {"prompt": [1], "truncate_prompt_tokens": nothing, "max_tokens": 600}
        assert refusal(PATH, body)["param"] == "truncate_prompt_tokens"


def test_a_text_starts_with_bos_unless_that_is_refused_and_may_name_control_tokens() -> None:
    tokenizer = ByteTokenizer(bos=1)
    seen = []
    tokenizer.encode = lambda text, *, add_bos=True, parse_special=False: seen.append((add_bos, parse_special)) or [5]  # type: ignore[method-assign]
    complete(fake_engine(tokenizer=tokenizer))
    complete(fake_engine(tokenizer=tokenizer), add_special_tokens=False)
    assert seen == [(True, True), (False, True)]


def test_echo_scores_the_prompt_as_lm_eval_wants_it() -> None:
    engine = saying(b"!", reason="length")
    answer = complete(engine, prompt=[[65, 66], [67]], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1)
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert [choice["text"] for choice in answer["choices"]] == ["AB!", "C!"]
    assert first == {
        "tokens": ["A", "B", "!"],
        "token_logprobs": [None, -1.0, -0.5],
        "top_logprobs": [None, {"B": -1.0}, {"!": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert second["token_logprobs"] == [None, -0.5]
    assert engine.params[0].prompt_logprobs == 1


def test_a_prompt_may_be_scored_alone() -> None:
    engine = fake_engine()
    answer = complete(engine, prompt=[65, 66, 67], max_tokens=0, echo=True, logprobs=0)
    assert answer["choices"][0]["text"] == "ABC" and answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert complete(fake_engine(), max_tokens=0, echo=True)["choices"][0]["text"] == "Hi"


def test_tokens_that_are_no_characters_are_spelled_in_bytes() -> None:
    answer = complete(saying(EMOJI.encode()), logprobs=2)
    choice = answer["choices"][0]
    assert choice["text"] == EMOJI
    names = ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1]
    assert choice["logprobs"]["top_logprobs"][0] == {"bytes:\\xc3": -0.5, "(": -1.5}
    ids = complete(saying(EMOJI.encode()), logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert ids["tokens"][0] == "token_id:195"


def test_offsets_skip_what_leaves_no_text() -> None:
    special = ByteTokenizer([b"<eos>"], special=[256])
    engine = fake_engine(tokenizer=special, script=lambda *_: [65, 256, 66, "stop"])
    shown = complete(engine, logprobs=0, skip_special_tokens=False)["choices"][0]
    hidden = complete(engine, logprobs=0)["choices"][0]
    assert (shown["text"], shown["logprobs"]["text_offset"]) == ("A<eos>B", [0, 1, 6])
    assert (hidden["text"], hidden["logprobs"]["text_offset"]) == ("AB", [0, 1, 1])


def test_an_echoed_text_loses_the_space_that_its_tokenizer_put_there() -> None:
    engine = fake_engine(tokenizer=ByteTokenizer(strips_space=True), script=lambda *_: [33, "stop"])
    choice = complete(engine, prompt=[32, 65], echo=True, logprobs=0)["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("A!", [0, 0, 1])


def test_prompt_scores_and_ids_have_vllms_shape() -> None:
    engine = saying(b"!")
    choice = complete(engine, prompt=[65, 66], prompt_logprobs=0, return_token_ids=True)["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"66": {"logprob": -1.0, "rank": 1, "decoded_token": "B"}}]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([33], [65, 66])
    body = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    assert refusal(PATH, body)["param"] == "prompt_logprobs"


def test_a_stop_string_is_cut_and_named() -> None:
    choice = complete(saying(b"one END two"), stop=["x", "END"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "END")
    kept = complete(saying(b"one END two"), stop="END", include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "one END"


def test_chunks_have_openais_shape() -> None:
    chunks = stream(PATH, saying(b"ab"), echo=True, stream_options={"include_usage": True})
    *parts, usage = chunks
    for chunk in chunks:
        TypeAdapter(Completion).validate_python(chunk, strict=True)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert [c["choices"][0]["text"] for c in parts] == ["Hia", "b", ""]
    assert [c["choices"][0]["finish_reason"] for c in parts] == [None, None, "stop"]
    assert all(c["usage"] is None for c in parts)
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 4
    assert all("usage" not in c for c in stream(PATH, saying(b"ab")))


def test_usage_may_come_with_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(PATH, saying(b"ab"), stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 2, 2]


def test_a_server_without_a_tokenizer_takes_ids() -> None:
    engine = fake_engine(tokenizer=None)
    answer = complete(engine, prompt=[5, 6], logprobs=1, max_tokens=1, return_token_ids=True, echo=True)
    assert answer["choices"][0]["token_ids"] == [33]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:33"]
    assert refusal(PATH, {"prompt": "a"}, engine)["param"] == "prompt"
    assert refusal("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, engine)["param"]
