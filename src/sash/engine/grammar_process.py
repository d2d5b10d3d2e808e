"""Grammars in processes of their own: ``python -m sash.engine.grammar_process FD``, FD an open socket to the core.

What users send as a schema is compiled and walked here, not in the core, for three reasons. Building the tokenizer
that llguidance wants takes seconds for a large vocabulary and holds the interpreter's lock for as long. Some grammars
overflow the stack or take minutes and gigabytes, which no option of the library prevents. And masks shall be made while
the core computes.

This process builds the tokenizer once and then forks a child for each grammar, which shares it. A child compiles its
grammar and answers with token masks, which it writes into memory that it shares with the core. It has limits of time
and memory and ends by a signal beyond them, alone. The core waits for none: see ``sash.engine.grammars``.
"""

from __future__ import annotations

import array
import contextlib
import gc
import mmap
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sash.engine.wire import BodyReader, pack
from sash.spec.structured import WHITESPACE, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from sash.text.base import Tokenizer

# Processor seconds for one mask: beyond them, and those for compiling, the child ends.
MASK_S = 2.0
# Bytes that a child may take beside what it shares.
MEMORY = 384 << 20
# Deep grammars are compiled recursively.
_STACK = 128 << 20
# Compiling gives way to the core's steps.
_NICE = 5
_ERROR_LENGTH = 400
# Lark writes its rules with a colon.
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The first message to the process: the model whose tokenizer it is, rows of its head, tokens that end an answer,
    bytes of a mask, and processor seconds for compiling. The file descriptor of the shared masks comes along."""

    model: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    mask_bytes: int
    compile_s: float


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Write the mask of what may follow to ``slot``. ``tokens`` are new since the last time; ``fresh``: they are all
    tokens of another answer. Without ``number`` nothing is asked: the slot's answer has ended."""

    slot: int
    number: int
    fresh: bool = False
    tokens: tuple[int, ...] = ()


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A mask is ready: to the question ``number``, or the one before any token where that is 0 (then ``mask`` has it).
    ``ended``: nothing may follow; ``error``: why there is no mask."""

    slot: int
    number: int
    ended: bool = False
    error: str = ""
    mask: bytes = b""


def main() -> int:
    """Serve one core until it goes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads don't outlive a fork
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the children
    data, handles, _, _ = socket.recv_fds(control, 1 << 16, 1)
    if not data:
        return 0
    setup = msgspec.msgpack.decode(data, type=Setup)
    masks = mmap.mmap(handles[0], 0)
    tokenizer: LLTokenizer | None = None
    error = ""
    try:
        tokenizer = build_tokenizer(setup)
    except BaseException as failed:  # a panic of the library is no Exception
        error = f"the model's tokenizer can't be used for it ({failed})"
    gc.freeze()
    while True:
        try:
            data, handles, _, _ = socket.recv_fds(control, 1, 2)
        except ConnectionError:
            return 0
        if not data:
            return 0
        if os.fork() == 0:
            control.close()
            _child(handles, tokenizer, error, masks, setup)
        for handle in handles:
            os.close(handle)


def build_tokenizer(setup: Setup) -> LLTokenizer:
    """The model's vocabulary as llguidance wants it; control tokens can't match text.

    Rows of the head without a token stand for no text, and never pass a mask.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    from sash.text.load import load_tokenizer

    tokenizer = load_tokenizer(setup.model)
    stops = [i for i in setup.stop_token_ids if i < setup.vocab_size]
    # Without an end token of the model's one is made up behind the vocabulary, where no mask reaches.
    size = setup.vocab_size + (not stops)
    vocabulary = Vocabulary(tokenizer, size, stops or [setup.vocab_size])
    built = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=size, eos_token=stops or [setup.vocab_size])
    vocabulary.greedy = built.greedy_tokenize
    return built


class Vocabulary:
    """What ``TokenizerWrapper`` reads of a tokenizer. Called, it tokenizes text that a grammar leaves no choice about:
    the model then reads it as it was trained to."""

    def __init__(self, tokenizer: Tokenizer, size: int, stops: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.greedy: Callable[[str], list[int]] | None = None
        self.eos_token_id, self.bos_token_id = stops[0], tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(i for i in {*tokenizer.special_ids, *stops} if i < size)
        for i in self.special_token_ids:
            self.tokens[i] = self.tokens[i] or f"<|{i}|>".encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text in the middle of others."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        ids = self._tokenizer.encode(text, add_bos=False)
        if self._spells(ids, text):
            return ids
        # Some tokenizers put a space before a text, which must not get into the middle of one.
        ids = self._tokenizer.encode("\n" + text, add_bos=False)
        for cut in range(1, min(len(ids), 4)):
            if self._spells(ids[cut:], text):
                return ids[cut:]
        return self.greedy(text) if self.greedy else []

    def _spells(self, ids: list[int], text: str) -> bool:
        return all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == text.encode()


def _child(handles: Sequence[int], tokenizer: LLTokenizer | None, error: str, masks: mmap.mmap, setup: Setup) -> None:
    """One grammar's process, from its fork to its end; doesn't return."""
    with contextlib.suppress(BaseException):
        link = socket.socket(fileno=handles[0])
        with os.fdopen(handles[1], "rb") as file:
            wanted = msgspec.msgpack.decode(file.read(), type=StructuredOutputs)
        if tokenizer is None:
            link.sendall(pack(msgspec.msgpack.encode(Answer(0, 0, error=error))))
        else:
            _limit()
            Walker(tokenizer, masks, setup).serve(link, wanted)
    os._exit(0)


def _limit() -> None:
    """No more memory than allowed, no files of a crash, nothing on standard error."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)


@contextlib.contextmanager
def _at_most(seconds: float) -> Any:
    """The process ends where the body takes more processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


class Walker:
    """Masks of one grammar, for any number of answers."""

    def __init__(self, tokenizer: LLTokenizer, masks: mmap.mmap, setup: Setup) -> None:
        self._tokenizer = tokenizer
        self._masks = masks
        self._size = setup.mask_bytes
        self._compile_s = setup.compile_s
        self._start: LLMatcher | None = None
        self._matchers: dict[int, LLMatcher] = {}

    def serve(self, link: socket.socket, wanted: StructuredOutputs) -> None:
        """Compile, tell of it, and answer until the core goes."""
        link.sendall(pack(msgspec.msgpack.encode(self._compile(wanted))))
        decoder = msgspec.msgpack.Decoder(Ask)
        reader = BodyReader()
        while data := link.recv(1 << 16):
            for body in reader.feed(data):
                answer = self._take(decoder.decode(body))
                if answer is not None:
                    link.sendall(pack(msgspec.msgpack.encode(answer)))

    def _compile(self, wanted: StructuredOutputs) -> Answer:
        found: list[Answer] = []

        def work() -> None:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                self._start = compiled(self._tokenizer, wanted)
                found.append(self._mask(self._start.deep_copy(), 0, 0))
            except BaseException as error:  # a panic of the library is no Exception
                found.append(Answer(0, 0, error=_short(str(error) or type(error).__name__)))

        threading.stack_size(_STACK)
        thread = threading.Thread(target=work)
        with _at_most(self._compile_s):
            thread.start()
            thread.join()
        return found[0]

    def _take(self, ask: Ask) -> Answer | None:
        if not ask.number:
            self._matchers.pop(ask.slot, None)
            return None
        if ask.fresh and self._start is not None:
            self._matchers[ask.slot] = self._start.deep_copy()
        with _at_most(MASK_S):
            matcher = self._matchers[ask.slot]
            matcher.consume_tokens(list(ask.tokens))
            return self._mask(matcher, ask.slot, ask.number)

    def _mask(self, matcher: LLMatcher, slot: int, number: int) -> Answer:
        """The mask, at its slot where a question was asked, else in the answer."""
        if not matcher.is_error() and matcher.is_stopped():
            return Answer(slot, number, ended=True)
        room = array.array("B", bytes(-(-self._tokenizer.vocab_size // 32) * 4))
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(room.buffer_info()[0], len(room))
        if matcher.is_error():
            return Answer(slot, number, error=_short(matcher.get_error()))
        mask = room.tobytes()[: self._size]
        if not number:
            return Answer(slot, 0, mask=mask)
        self._masks[slot * self._size : slot * self._size + len(mask)] = mask
        return Answer(slot, number)


def compiled(tokenizer: LLTokenizer, wanted: StructuredOutputs) -> LLMatcher:
    """A matcher before its first token.

    Raises:
        ValueError: the grammar isn't one, or asks for what the library can't do.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, _grammar(wanted), log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _grammar(wanted: StructuredOutputs) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    if wanted.kind in ("json", "json_object"):
        options: JsonCompileOptions = {"lenient": wanted.lenient, "whitespace_pattern": WHITESPACE}
        if wanted.disable_any_whitespace:
            options = {"lenient": wanted.lenient, "whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(wanted.text or '{"type":"object"}', overrides=options)
    if wanted.kind == "grammar":
        return grammar_from("gbnf" if _GBNF_RULE.search(wanted.text) else "lark", wanted.text)
    return grammar_from("choice" if wanted.kind == "choice" else "regex", wanted.text)


def _short(error: str) -> str:
    """The first lines of an error; the library may add its state."""
    text = error.split("<state>")[0].replace("<non-verbose/>", "").strip()
    text = " ".join(text.split()).replace("NoExtensionBias", "no text can fit it")
    return text if len(text) <= _ERROR_LENGTH else text[:_ERROR_LENGTH] + " …"


if __name__ == "__main__":
    sys.exit(main())
