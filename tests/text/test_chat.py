"""Chat templates in the sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from tests.real_models import real_model
from tests.text.fakes import ByteTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from sash.spec.errors import ModelError, RequestError
from sash.spec.sampling import SamplingParams
from sash.text.base import Tokenizer
from sash.text.chat import PLAIN_TEMPLATE, encode_chat, end_turns, render_chat
from sash.text.load import load_tokenizer

HI = [{"role": "user", "content": "hi"}]
GEMMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def render(template: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    tokenizer = ByteTokenizer([b"<s>"], bos=256)
    return render_chat(tokenizer, HI if messages is None else messages, template=template, **options)


@pytest.mark.real
def test_a_template_that_has_bos_gives_one_bos() -> None:
    gemma = load_tokenizer(real_model("gemma3-270m"))
    want = [2, 105, 2364, 107, 2202, 106, 107, 105, 4368, 107]
    assert encode_chat(gemma, HI, template=GEMMA_LIKE) == want
    assert encode_chat(gemma, HI, template=GEMMA_LIKE.replace("{{ bos_token }}", "")) == want


@pytest.mark.real
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_renders_as_transformers_does(add_generation_prompt: bool) -> None:
    tokenizer: Tokenizer = load_tokenizer(real_model("smollm2-135m"))
    system = {"role": "system", "content": 'Be <brief> & "kind".'}
    for messages in (HI, [system, *HI, {"role": "assistant", "content": "Hello! 🎉"}, *HI]):
        [want], _ = render_jinja_template(
            [messages],
            chat_template=tokenizer.chat_template,
            add_generation_prompt=add_generation_prompt,
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
        )
        assert render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt) == want
        ids = encode_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt)
        assert ids == tokenizer.encode(want, parse_special=True)
        assert ids.count(2) == len(messages) + (messages[0] is not system)  # its template adds a system message


def test_the_plain_template_has_one_space_before_each_text() -> None:
    talk = [*HI, {"role": "assistant", "content": " hello\n"}, {"role": "user", "content": "  so?"}]
    assert render(PLAIN_TEMPLATE, talk) == "user: hi\nassistant: hello\nuser: so?\nassistant:"


def test_answers_in_the_plain_template_end_where_either_would_speak() -> None:
    assert end_turns(SamplingParams(stop="x"), PLAIN_TEMPLATE).stop == ("x", "\nuser:", "\nassistant:")
    assert end_turns(SamplingParams(stop="x"), GEMMA_LIKE).stop == ("x",)


def test_no_template_says_what_to_do() -> None:
    fix = r"no chat template: give LLM.chat_prompt one \(sash.text.chat.PLAIN_TEMPLATE .*, or use LLM.generate"
    with pytest.raises(ModelError, match=fix):
        render_chat(ByteTokenizer(), HI)


def test_the_helpers_that_templates_use() -> None:
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for m in messages %}{% if true %}{% break %}{% endif %}x{% endfor %}y") == "y"
    assert render("a{% generation %}b{{ bos_token }}{% endgeneration %}") == "ab<s>"
    assert render("{% if true %}\n  x\n{% endif %}\n") == "  x\n"
    assert render("{{ tools[0] }}|{{ eos_token }}|", tools=["t"]) == "t||"


def test_a_refusal_by_the_template_is_the_requests_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="don't fit the model's chat template"):
        render("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(RequestError, match="by zero"):
        render("{{ 1 // 0 }}")


def test_a_template_that_is_no_jinja_is_the_models_error() -> None:
    with pytest.raises(ModelError, match=r"not valid jinja \(line 2.*--chat-template FILE .*with chat_template"):
        render("\n{% for %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(template: str) -> None:
    with pytest.raises(RequestError):
        render(template)


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0]['content'] }}", [{"role": "user", "content": parts}]) == "ab"
    with pytest.raises(RequestError, match="must be text or a list"):
        render("x", [{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(RequestError, match="with a role"):
        render("x", [{"content": "x"}])
    with pytest.raises(RequestError, match="with a role"):
        render("x", ["hello"])  # type: ignore[list-item]
