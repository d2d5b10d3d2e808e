"""Bodies that no endpoint may take, by the thousand, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COMPLETION = {"model": "tiny", "prompt": "Hello é", "max_tokens": 5, "temperature": 0, "stop": ["x"], "stream": False}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi \u2603"}], "max_tokens": 5}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": {"model": "tiny", "prompt": "Hello"},
    "/detokenize": {"model": "tiny", "tokens": [72, 105]},
    "/v1/responses": {"model": "tiny", "input": "Hello", "max_output_tokens": 5},
    "/v1/jobs": {"model": "tiny", "prompts": ["Hello", "you"], "max_tokens": 3},
}
NOT_TEXT = (5, 1.5, True, {}, [[]], {"a": "b"})
NOT_INT = ("5", 1.5, [], {}, True, [1], "x")
NOT_FLOAT = ("0.5", [], {}, True, "NaN")
NOT_BOOL = ("true", 1, 0, [], {})
NOT_IDS = ("1", 5, {}, [-1], [1.5], ["1"], [None], [True], [10**30], [[1]])
SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (*NOT_INT, 0, -1, 10**6),
    "temperature": (*NOT_FLOAT, -0.1),
    "top_p": (*NOT_FLOAT, 0, 1.1, -1),
    "top_k": (*NOT_INT, -2),
    "min_p": (*NOT_FLOAT, -0.1, 1.1),
    "repetition_penalty": (*NOT_FLOAT, 0, -1),
    "presence_penalty": (*NOT_FLOAT, -2.1, 2.1),
    "frequency_penalty": (*NOT_FLOAT, -2.1, 2.1),
    "logit_bias": (5, "x", [], {"a": 1}, {"1": "x"}, {"1": None}, {"-1": 1}),
    "seed": ("5", 1.5, [], {}, True),
    "stop": (5, {}, [5], [""], [[]], "", ["x"] * 1000),
    "stop_token_ids": NOT_IDS,
    "allowed_token_ids": NOT_IDS,
    "stream": NOT_BOOL,
    "stream_options": (5, "x", [], {"include_usage": 5}),
    "ignore_eos": NOT_BOOL,
    "min_tokens": (*NOT_INT, -1, 10**6),
    "max_tokens": (*NOT_INT, -1, 10**12, -(10**40)),
    "truncate_prompt_tokens": (*NOT_INT, -2, 0),
    "model": (*NOT_TEXT, [], "other", "tiny\0", "../tiny", "", "\ud800"),
}
FORMS: dict[str, tuple[Any, ...]] = {
    "response_format": (5, "json", [], {}, {"type": "xml"}, {"type": "json_schema"}, {"type": 5}),
    "structured_outputs": (5, "x", [], {"regex": 5}, {"choice": []}, {"json": "{"}, {"a": 1}),
    "guided_json": (5, [], "{", True),
    "guided_regex": (5, []),
    "guided_choice": (5, "x", {}, [], [5]),
    "guided_grammar": (5, []),
}
TOOLS: dict[str, tuple[Any, ...]] = {
    "tools": (5, "x", {}, [5], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": 5}}]),
    "tool_choice": (5, [], {}, "maybe", {"type": "function"}, {"type": "function", "function": {"name": "x"}}),
}
BAD_MESSAGES = (
    *(5, "x", {}, [], [5], [[]], [{}], [{"role": "user", "content": 5}], [{"content": "x"}], [{"role": 5}], [None]),
    *([{"role": "", "content": "x"}], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    *([{"role": "user", "content": ["x"]}], [{"role": "user", "content": "\udcff"}], [{"role": "\ud800"}]),
)
BAD_PROMPTS = (
    5,
    True,
    {},
    [],
    "",
    [[]],
    ["x", 5],
    [5, "x"],
    [[5], "x"],
    [None],
    [1.5],
    [-1],
    [10**12],
    "a\ud800",
    [""],
)
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": SAMPLING
    | FORMS
    | {"prompt": BAD_PROMPTS, "logprobs": (*NOT_INT[:4], -1, 1000), "best_of": (7,), "echo": NOT_BOOL},
    "/v1/chat/completions": SAMPLING
    | FORMS
    | TOOLS
    | {"messages": BAD_MESSAGES, "logprobs": NOT_BOOL, "top_logprobs": (*NOT_INT, -1, 1000, 3)},
    "/tokenize": {"prompt": (5, {}, [], True, "\ud800"), "model": SAMPLING["model"], "add_special_tokens": NOT_BOOL},
    "/detokenize": {"tokens": NOT_IDS, "model": SAMPLING["model"]},
    "/v1/responses": {name: SAMPLING[name] for name in ("model", "temperature", "top_p", "stream", "seed", "stop")}
    | {"input": (5, True, {}, [], [5], [{}], [{"role": "user", "content": 5}], "a\ud800", [{"type": "x"}])}
    | {"max_output_tokens": (*NOT_INT, 0, -1), "store": NOT_BOOL, "text": (5, "x", {"format": {"type": "xml"}})}
    | {"previous_response_id": (5, [], "resp_none"), "metadata": (5, "x", [], {"a": 5}), "truncation": (5, "some")},
    "/v1/jobs": {name: SAMPLING[name] for name in ("model", "temperature", "top_k", "max_tokens", "stop", "n")}
    | {"prompts": (5, "x", {}, [], [{}], [True], [[-1]], ["x", 5.5]), "max_concurrency": (*NOT_INT, 0, -1)}
    | {"requests": (5, "x", {}, [], [5], [{}], [{"endpoint": "/health", "body": {}}])}
    | {"metadata": (5, "x", [], {"a": 5}), "expires_after_s": (*NOT_FLOAT, 0, -1, 1e9)},
}
HUGE = (
    "1e400",
    "-1e999",
    "1" + "0" * 5000,
    "NaN",
    "Infinity",
    "-Infinity",
    "0x10",
    "01",
    "1.",
    ".5",
    "+1",
    "1e",
    "--1",
)
TYPES = (
    *("text/plain", "application/xml", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("", "json", "application/jsonx", "text/json", "application/octet-stream", "image/png", "application/json/x"),
)
CODINGS = ("gzip", "deflate", "br", "gzip, identity", "x")


@dataclass(frozen=True)
class Malformed:
    """A request that must be refused. ``kind`` says why."""

    kind: str
    path: str
    body: bytes
    content_type: str = "application/json"
    content_encoding: str = ""


Maker = Callable[[random.Random, str, dict[str, Any]], bytes]


def _text(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def truncated(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    data = json.dumps(valid, ensure_ascii=rng.random() < 0.5).encode()
    return data[: rng.randrange(1, len(data) - 1)]


def wrong_type(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    name = rng.choice(sorted(WRONG[path]))
    return _text(valid | {name: rng.choice(WRONG[path][name])})


def two_wrong(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    names = rng.sample(sorted(WRONG[path]), 2)
    return _text(valid | {name: rng.choice(WRONG[path][name]) for name in names})


def missing(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    needed = {"/v1/chat/completions": "messages", "/detokenize": "tokens", "/v1/responses": "input"}
    name = needed.get(path, "prompts" if path == "/v1/jobs" else "prompt")
    rest = {key: value for key, value in valid.items() if key != name}
    return _text(rest | rng.choice([{}, {name: None}, {name.upper(): valid[name]}]))


def nested(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    depth = rng.choice([1500, 5000, 20_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"b":', b"}]")])
    deep = opening * depth + (b"1" + closing * depth) * (rng.random() < 0.5)
    name = rng.choice(sorted(valid)).encode()
    return rng.choice([deep, b'{"%b":%b}' % (name, deep), _text(valid)[:-1] + b',"extra":' + deep + b"}"])


def huge_number(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    name = rng.choice([key for key in sorted(WRONG[path]) if key not in ("seed", "extra")])
    return _text(valid)[:-1] + f',"{name}":{rng.choice(HUGE)}}}'.encode()


def control_character(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    """A raw NUL, newline or escape where none may stand: inside a name or a text, or between two parts."""
    data = _text(valid)
    at = rng.choice([i + 1 for i, byte in enumerate(data) if byte == 0x22])
    return (
        data[:at] + rng.choice([b"\0", b"\x1b", b"\n", b"\x0b", b"\x1f"]) + data[at:] if _in_text(data, at) else b"\0"
    )


def _in_text(data: bytes, at: int) -> bool:
    return data[:at].count(b'"') % 2 == 1


def invalid_utf8(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    bad = rng.choice(
        [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80", b"\xe2\x82", b"\xf4\x90\x80\x80"]
    )
    data = _text(valid)
    at = rng.choice([i + 1 for i, byte in enumerate(data) if byte == 0x22 and _in_text(data, i + 1)])
    return data[:at] + bad + data[at:]


def duplicate_key(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    """The last of two equal names counts, and is wrong."""
    name = rng.choice([key for key in sorted(WRONG[path]) if key in valid])
    return _text(valid)[:-1] + b"," + _text({name: rng.choice(WRONG[path][name])})[1:]


def no_object(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    data = _text(valid)
    return rng.choice(
        [
            *(b"", b" ", b"null", b"5", b'"x"', b"[]", b"true", b"{}", b"{", b"}", b"[" + data + b"]", data + data),
            *(data + b"x", b"\xef\xbb\xbf" + data, data.replace(b'"', b"'"), b"// x\n" + data, data[:-1] + b",}"),
            *(json.dumps(valid).encode("utf-16"), json.dumps(valid).encode("utf-32-le"), b"{" + data + b"}"),
        ]
    )


def noise(rng: random.Random, path: str, valid: dict[str, Any]) -> bytes:
    return b"\x01" + rng.randbytes(rng.randrange(300))


MAKERS: tuple[Maker, ...] = (
    *(truncated, wrong_type, two_wrong, missing, nested, huge_number, control_character, invalid_utf8),
    *(duplicate_key, no_object, noise),
)


def malformed(count: int, max_body_bytes: int, seed: int = 1) -> Iterator[Malformed]:
    """``count`` requests, every kind on every endpoint."""
    rng = random.Random(seed)
    for i in range(count):
        path = rng.choice(sorted(VALID))
        valid = VALID[path]
        kind = i % (len(MAKERS) + 3)
        if kind < len(MAKERS):
            maker = MAKERS[kind]
            yield Malformed(maker.__name__, path, maker(rng, path, valid))
        elif kind == len(MAKERS):
            yield Malformed("content_type", path, _text(valid), content_type=rng.choice(TYPES))
        elif kind == len(MAKERS) + 1:
            yield Malformed("content_encoding", path, _text(valid), content_encoding=rng.choice(CODINGS))
        else:
            filler = b" " * (max_body_bytes + 1 + rng.randrange(1000))
            yield Malformed("oversized", path, _text(valid)[:-1] + filler + b"}")
