from __future__ import annotations

from pathlib import Path

from tests.cli.scripted import HELLO, Piece, Run, ScriptedEngine, Step, WordTokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def test_a_conversation_keeps_what_was_said(run: Run, hello: ScriptedEngine) -> None:
    outcome = run("chat", "tiny", "--system", "Be brief.", engine=hello, stdin="Hi\nAgain\n\nnot asked\n")
    assert (outcome.code, outcome.out) == (0, "Hello!\nHello!\n")
    conversation = "<system>Be brief.<user>Hi<assistant>Hello!<user>Again<assistant>"
    assert hello.tokenizer.texts[-1] == conversation
    assert [prompt for prompt, _ in hello.requests][-1] == [ord(letter) for letter in conversation]
    assert len(hello.requests) == 2


def test_a_model_without_template_gets_lines_and_leaves_the_users_to_them(run: Run) -> None:
    engine = ScriptedEngine(HELLO, tokenizer=WordTokenizer(None))
    assert run("chat", "tiny", "--stop", "END", engine=engine, stdin="Hi\n").out == "Hello!\n"
    assert engine.tokenizer.texts[-1] == "user: Hi\nassistant:"
    assert engine.requests[-1][1].stop == ("END", "\nuser:", "\nassistant:")


def test_a_broken_template_is_refused_before_the_weights_are_looked_for(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat.jinja").write_text("{% for %}")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    outcome = run("chat", str(tmp_path), "--chat-template", str(tmp_path / "chat.jinja"), stdin="Hi\n")
    assert outcome.code == 2
    assert outcome.err.startswith("sash: the chat template is not valid jinja")


def test_a_template_file_makes_it_chat(run: Run, tmp_path: Path) -> None:
    engine = ScriptedEngine(HELLO, tokenizer=WordTokenizer(None))
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert run("chat", "tiny", "--chat-template", str(file), engine=engine, stdin="Hi\n").out == "Hello!\n"
    assert engine.tokenizer.texts[-1] == "Hi!"
    outcome = run("chat", "tiny", "--chat-template", str(tmp_path / "none"), engine=engine)
    assert outcome.code == 2
    assert "--chat-template" in outcome.err


def test_interrupt_cuts_the_answer_and_keeps_the_conversation(run: Run) -> None:
    engine = ScriptedEngine([Step([Piece("Hel", [5])]), KeyboardInterrupt()])
    outcome = run("chat", "tiny", engine=engine, stdin="Hi\nAgain\n")
    assert (outcome.code, outcome.out) == (0, "Hel\nHel\n")
    assert engine.tokenizer.texts[-1] == "<user>Hi<assistant>Hel<user>Again<assistant>"


def test_interrupt_before_an_answer_leaves(run: Run) -> None:
    assert run("chat", "tiny", engine=ScriptedEngine([KeyboardInterrupt()]), stdin="Hi\n").code == 130


def test_wrong_input_is_refused(run: Run, hello: ScriptedEngine) -> None:
    several = run("chat", "tiny", "-n", "2", engine=hello)
    assert (several.code, several.err) == (2, "sash: --n must be 1 in a chat, got 2\n")
    assert run("chat", "tiny", engine=hello, stdin=b"\xff\n").code == 2
