"""With drafts or without: the same tokens, scores and endings, whichever drafts are right, on every kind of model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from tests.equivalence.harness import VOCAB, Answers, Request, Rig, build, random_tokens, tiny_spec
from tests.equivalence.scenario import FailingRunner
from tests.equivalence.test_options import MODELS
from tests.equivalence.test_sameness import scores, table

from sash.engine.core import EngineCore, StepRunner
from sash.engine.messages import CancelRequest
from sash.engine.runner import StepResult
from sash.engine.sequence import Sequence as Answering
from sash.ops import native
from sash.scheduler.plan import StepPlan
from sash.spec.config import EngineConfig
from sash.spec.span import Span

W = 6
DRAFT = 7
OPTIONS = EngineConfig(
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    page_size=4,
    chunked_prefill_size=5,
    speculative="ngram",
    num_speculative_tokens=DRAFT,
    prompt_lookup_min=1,
)
SPANS: dict[str, list[Span]] = MODELS | {
    "window of 1": [Span.sliding(1), Span.full()],
    "odd chunk": [Span.chunked(7), Span.sliding(4, sinks=3)],
}
MIX = [
    Request("a", random_tokens(3, 1), 40),
    Request("b", random_tokens(W, 2), 35),
    Request("c", random_tokens(3 * W, 5), 3 * W, at_step=3),
    Request("d", random_tokens(23, 6), 30, at_step=6),
]


@dataclass
class Prophet:
    """Drafts of random length: the answer that is to come, with a wrong token in some places."""

    prompt: tuple[int, ...]
    answer: list[int]
    rng: random.Random
    settled: list[tuple[int, int]] = field(default_factory=list)

    def propose(self, tokens: list[int]) -> list[int]:
        """Up to ``DRAFT`` tokens."""
        done = len(tokens) - len(self.prompt)
        draft = self.answer[done : done + self.rng.randint(0, DRAFT)]
        if draft and self.rng.random() < 0.6:
            wrong = self.rng.randrange(len(draft))
            draft[wrong] = (draft[wrong] + self.rng.randint(1, VOCAB - 1)) % VOCAB
            draft += [self.rng.randrange(VOCAB)] * (DRAFT - len(draft))
        return draft

    def settle(self, proposed: int, accepted: int) -> None:
        """Remember."""
        self.settled.append((proposed, accepted))


@dataclass
class Prophets:
    """Gives every answer of a plain run its prophet; a hook of ``Rig.run``."""

    answers: Answers
    seed: int = 0
    made: dict[str, Prophet] = field(default_factory=dict)
    also: Callable[[EngineCore, Answers], None] | None = None

    def __call__(self, core: EngineCore, answers: Answers) -> None:
        """Before each step."""
        for name, seq in core._sequences.items():
            if name not in self.made:
                plain = self.answers[name]
                self.made[name] = Prophet(plain.prompt, plain.tokens, random.Random(f"{self.seed} {name}"))
            seq.lookup = self.made[name]  # type: ignore[assignment]
        if self.also is not None:
            self.also(core, answers)

    def assert_tried(self) -> None:
        """Drafts were checked: right to the end, right in part and wrong from the start."""
        settled = [pair for one in self.made.values() for pair in one.settled]
        assert any(right == all_ > 0 for all_, right in settled), "no draft was right to its end"
        assert any(0 < right < all_ for all_, right in settled), "no draft was right in part"
        assert any(right == 0 < all_ for all_, right in settled), "no draft was wrong from the start"


class Recorder:
    """Remembers the plans."""

    def __init__(self, inner: StepRunner) -> None:
        self._inner, self.device = inner, inner.device
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan, sequences: dict[str, Answering]) -> StepResult:
        """Remember, then run."""
        self.plans.append(plan)
        return self._inner.run(plan, sequences)


def engine(
    spans: Sequence[Span] = MODELS["hybrid"],
    pages: tuple[int, ...] | None = None,
    kernels: str = "torch",
    **options: object,
) -> tuple[Rig, Recorder]:
    rig = build(
        tiny_spec(spans),
        replace(OPTIONS, **options),  # type: ignore[arg-type]
        pages=None if pages is None else lambda config: pages,
        kernels=kernels,
    )
    recorder: list[Recorder] = []
    rig.wrap(lambda inner: recorder.append(Recorder(inner)) or recorder[0])  # type: ignore[func-returns-value]
    return rig, recorder[0]


def plain_run(
    requests: Sequence[Request], spans: Sequence[Span] = MODELS["hybrid"], kernels: str = "torch", **options: object
) -> Answers:
    return engine(spans, kernels=kernels, **(options | {"speculative": "none"}))[0].run(requests)


def assert_same(drafted: Answers, plain: Answers, exactly: bool = False) -> None:
    assert drafted.keys() == plain.keys()
    for name, answer in plain.items():
        other = drafted[name]
        assert other.tokens == answer.tokens, name
        assert (other.finish_reason, other.error) == (answer.finish_reason, answer.error), name
        if not answer.logprobs:
            assert not other.logprobs, name
        elif exactly:
            assert torch.equal(scores(other), scores(answer)), name
        else:
            torch.testing.assert_close(table(other.logprobs), table(answer.logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("model", SPANS)
def test_right_and_wrong_drafts_change_nothing(model: str, page: int) -> None:
    plain = plain_run(MIX, SPANS[model], page_size=page)
    rig, recorder = engine(SPANS[model], page_size=page)
    prophets = Prophets(plain)
    drafted = rig.run(MIX, prophets)
    rig.assert_exact(drafted)
    assert_same(drafted, plain)
    prophets.assert_tried()
    plans = recorder.plans
    assert any(any(i.num_drafts for i in p.items) and any(not i.samples for i in p.items) for p in plans), (
        "no step has drafts and a chunk of a prompt"
    )


@pytest.mark.parametrize("model", SPANS)
def test_right_and_wrong_drafts_change_nothing_in_cpp(model: str) -> None:
    if native.load()[0] is None:
        pytest.skip(native.load()[1])
    plain = plain_run(MIX, SPANS[model], kernels="native")
    prophets = Prophets(plain)
    assert_same(engine(SPANS[model], kernels="native")[0].run(MIX, prophets), plain)
    prophets.assert_tried()


SAMPLING: dict[str, dict[str, object]] = {
    "sampled": {"temperature": 1.2, "top_p": 0.9},
    "top k": {"temperature": 0.8, "top_k": 12},
    "min p": {"temperature": 1.5, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.7},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.9},
    "bias": {"logit_bias": {5: 4.0, 9: -8.0}, "bad_token_ids": (3, 4)},
    "allowed": {"allowed_token_ids": tuple(range(20)), "temperature": 1.0},
    "no logprobs": {"logprobs": None, "prompt_logprobs": None},
    "three": {"n": 3, "temperature": 1.0, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("how", SAMPLING)
def test_however_tokens_are_chosen(how: str) -> None:
    asked = [replace(r, seed=i, sampling=SAMPLING[how]) for i, r in enumerate(MIX)]
    plain = plain_run(asked)
    for seed in range(2):
        prophets = Prophets(plain, seed)
        assert_same(engine()[0].run(asked, prophets), plain)
        prophets.assert_tried()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_tokens", [0, 4, 9])
def test_an_answer_ends_where_it_would(min_tokens: int, temperature: float) -> None:
    """At a stop token in the middle of right drafts, not before min_tokens, and never past max_tokens."""
    free = plain_run([replace(r, sampling={"temperature": temperature}) for r in MIX])
    ends = []
    for request in MIX:
        stop = free[request.name].tokens[min_tokens + 3]
        ends.append(replace(request, sampling={"temperature": temperature, "min_tokens": min_tokens}, stop=(stop,)))
    plain = plain_run(ends)
    assert {a.finish_reason for a in plain.values()} >= {"stop"}
    accepted = []
    for seed in range(3):
        drafted = engine()[0].run(ends, Prophets(free, seed))
        assert_same(drafted, plain)
        accepted += [a.accepted_tokens for a in drafted.values()]
    assert max(accepted) > 1


def test_deterministic_stays_bit_for_bit_the_same() -> None:
    spans = [Span.sliding(W), Span.full(), Span.sliding(W, sinks=2), Span.chunked(W)]
    asked = [replace(r, seed=i, sampling={"temperature": float(i % 2)}) for i, r in enumerate(MIX)]
    plain = plain_run(asked, spans, deterministic=True)
    prophets = Prophets(plain)
    assert_same(engine(spans, deterministic=True)[0].run(asked, prophets), plain, exactly=True)
    prophets.assert_tried()


# ------------------------------------------------------------------------------------------------ budgets


def test_drafts_take_only_rows_to_spare() -> None:
    """At most half of what single rows leave where prompts wait; the token budget holds; chunks keep going."""
    plain = plain_run(MIX)
    rig, recorder = engine(max_num_batched_tokens=8, chunked_prefill_size=8)
    prophets = Prophets(plain)
    assert_same(rig.run(MIX, prophets), plain)
    assert max(p.num_tokens for p in recorder.plans) == 8
    for plan in recorder.plans:
        drafts = sum(i.num_drafts for i in plan.items)
        if any(not i.samples for i in plan.items):
            assert drafts <= (8 - sum(i.samples and i.count == 1 + i.num_drafts for i in plan.items)) // 2
    assert any(i.num_drafts == 7 for p in recorder.plans for i in p.items), "alone, a request may use the whole step"


def test_drafts_never_cost_anybody_his_pages() -> None:
    """Pages run out, and no more requests are preempted than without drafts."""
    asked = [Request(f"r{i}", random_tokens(6 + i, i), 18) for i in range(4)]
    options: dict[str, object] = {"pages": (60, 8), "max_model_len": 32}
    rig, _ = engine(**(options | {"speculative": "none"}))  # type: ignore[arg-type]
    plain = rig.run(asked)
    before = rig.core.scheduler.num_preemptions
    rig, recorder = engine(**options)  # type: ignore[arg-type]
    drafted = rig.run(asked, Prophets(plain))
    assert_same(drafted, plain)
    assert 0 < rig.core.scheduler.num_preemptions <= before and drafted["r0"].preemptions == 0
    taken = [i for p in recorder.plans for i in p.items if i.num_drafts]
    assert taken and all(i.end < 32 for i in taken)


def test_the_longest_request_fits_a_pool_made_for_it() -> None:
    """Up to max_model_len to the last row, though drafts would go beyond."""
    for spans in (MODELS["hybrid"], MODELS["reference"], MODELS["window"]):
        asked = [Request("a", random_tokens(9, 1), 119)]
        plain = plain_run(asked, spans)
        rig, recorder = engine(spans, max_num_seqs=1, max_num_batched_tokens=12)
        prophets = Prophets(plain)
        assert_same(rig.run(asked, prophets), plain)
        assert max(i.end for p in recorder.plans for i in p.items) == 127


# ------------------------------------------------------------------------------------------------ life


@pytest.mark.parametrize("model", ["hybrid", "two windows", "reference", "chunked"])
def test_preempted_with_drafts_and_resumed(model: str) -> None:
    plain = plain_run(MIX, SPANS[model])

    def preempt(core: EngineCore, answers: Answers) -> None:
        if core.counters.steps in (6, 9, 14) and core.scheduler.running:
            core.scheduler.preempt(core.scheduler.running[0])

    rig, _ = engine(SPANS[model])
    prophets = Prophets(plain, also=preempt)
    assert_same(rig.run(MIX, prophets), plain)
    assert rig.core.scheduler.num_preemptions >= 3
    prophets.assert_tried()


def test_cancelled_in_the_middle_of_drafts() -> None:
    plain = plain_run(MIX)

    def cancel(core: EngineCore, answers: Answers) -> None:
        if len(answers["a"].tokens) > 12:
            core.cancel(CancelRequest("a"))

    drafted = engine()[0].run(MIX, Prophets(plain, also=cancel))
    gone = drafted.pop("a")
    assert gone.finish_reason == "cancelled" and gone.tokens == plain["a"].tokens[: len(gone.tokens)]
    assert_same(drafted, {name: answer for name, answer in plain.items() if name != "a"})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [9, 14, 25, 33])
@pytest.mark.parametrize("model", ["hybrid", "window", "odd chunk", "reference"])
def test_a_step_that_raises_once_is_repeated_in_place(model: str, at: int, after: bool) -> None:
    """The slack keeps every row that the step read, so nothing is computed again but its row, without drafts."""
    plain = plain_run(MIX, SPANS[model])
    rig, recorder = engine(SPANS[model])
    rig.wrap(lambda inner: FailingRunner(inner, victim="a", at=at, after=after))
    assert_same(rig.run(MIX, Prophets(plain)), plain)
    assert rig.core.counters.failed_steps == 1
    tries = [i for p in recorder.plans for i in p.items if i.request_id == "a"]
    assert sum(i.start == 0 for i in tries) == 1, "it started again from position 0"
    if after:
        first = next(n for n, i in enumerate(tries) if i.end >= at)
        assert tries[first + 1].start == tries[first].start and tries[first + 1].num_drafts == 0


def test_who_always_raises_fails_alone_with_the_same_tokens() -> None:
    """Whether or not the bad row was reached as a draft."""
    plain = plain_run(MIX)

    class Bad:
        def __init__(self, inner: StepRunner) -> None:
            self._inner, self.device = inner, inner.device

        def run(self, plan: StepPlan, sequences: dict[str, Answering]) -> StepResult:
            if any(i.request_id == "a" and i.start <= 20 < i.end for i in plan.items):
                raise RuntimeError("row 20")
            return self._inner.run(plan, sequences)

    rig, _ = engine()
    rig.wrap(Bad)
    drafted = rig.run(MIX, Prophets(plain))
    bad = drafted.pop("a")
    assert bad.finish_reason == "error" and bad.tokens == plain["a"].tokens[:18]
    assert_same(drafted, {name: answer for name, answer in plain.items() if name != "a"})


def test_a_row_without_numbers_fails_when_its_turn_comes() -> None:
    """Logits behind a right draft that aren't finite: the tokens before them are told, then the error."""
    plain = plain_run(MIX[:1])
    rig, _ = engine()
    real, seen = rig.runner._logits, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out = real(hidden)
        if len(out) > 3:
            out[2:] = float("nan")
            seen.append(len(out))
        return out

    rig.runner._logits = logits
    asked = [replace(MIX[0], sampling={"prompt_logprobs": None})]
    assert_same(rig.run(asked, Prophets(plain)), plain_run(asked))
    assert seen


# ------------------------------------------------------------------------------------------------ the real lookup


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_text_that_repeats_itself_takes_fewer_steps(temperature: float) -> None:
    loop = random_tokens(9, 3) * 4
    asked = [
        Request("loop", loop, 60, sampling={"temperature": temperature, "logit_bias": dict.fromkeys(loop[:1], 9.0)}),
        *(replace(r, sampling={"temperature": temperature}) for r in MIX),
    ]
    plain_rig, _ = engine(speculative="none")
    plain = plain_rig.run(asked)
    rig, _ = engine()
    drafted = rig.run(asked)
    assert_same(drafted, plain)
    assert rig.core.counters.steps < plain_rig.core.counters.steps
    report = rig.core.report()
    assert 0 < report.accepted_tokens < report.draft_tokens
    told = [(a.draft_tokens, a.accepted_tokens) for a in drafted.values()]
    assert (sum(d for d, _ in told), sum(a for _, a in told)) == (report.draft_tokens, report.accepted_tokens)
