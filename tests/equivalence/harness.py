"""Tiny random engines, a dense oracle without a cache, and pools in which only what must survive survives.

    rig = build(tiny_spec([Span.sliding(5), Span.full()]), EngineConfig(...))
    answers = rig.run([Request("a", prompt, max_tokens=12)])
    rig.assert_exact(answers)

The engine scores every prompt position and every generated token over the whole vocabulary; the oracle scores the
same text in one cold dense run, with masks from ``Span.bind(prompt).visible`` alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from tests.dense import OPS, attend_all

from sash.engine.build import assemble
from sash.engine.core import EngineCore, StepRunner
from sash.engine.messages import AddRequest, Update
from sash.engine.runner import Runner, StepResult
from sash.engine.sequence import Sequence as Answering
from sash.kv.ledger.table import TableStep
from sash.models.decoder import Decoder
from sash.scheduler.plan import StepPlan
from sash.spec.config import EngineConfig, ResolvedConfig
from sash.spec.machine import Machine
from sash.spec.model import LayerSpec, MlpSpec, ModelSpec, RopeSpec, expected_weights
from sash.spec.sampling import SamplingParams, TokenLogprobs
from sash.spec.span import Span

VOCAB = 61
MACHINE = Machine(available_bytes=1 << 34, has_bf16=False)
# What unused memory holds: NaN, all bits set (a NaN too), and a large number that no masking by 0 would hide.
FILLS = {"nan": float("nan"), "ff": None, "large": 3e4}


def tiny_spec(spans: Sequence[Span], *, hidden: int = 16, max_position: int = 65_536, **layer: object) -> ModelSpec:
    """A model with one layer per span: grouped heads (4 over 2), head size 8, rope. ``layer`` overrides LayerSpec."""
    base = LayerSpec(
        span=Span.full(),
        span_source="test",
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        scale=8**-0.5,
        rope=RopeSpec(rotary_dim=8),
        mlp=MlpSpec(intermediate_size=24),
    )
    layers = tuple(replace(base, span=span, **layer) for span in spans)  # type: ignore[arg-type]
    return ModelSpec("tiny", VOCAB, hidden, layers, max_position)


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that keep attention uneven and yet no product so large that float32 rounding grows past the tolerance;
    everything is random, norms and sinks too."""
    noise = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in expected_weights(spec).items():
        values = torch.randn(shape, generator=noise)
        if name == "embed":
            out[name] = values * 0.7
        elif "norm" in name:
            out[name] = 1 + 0.3 * values
        else:
            out[name] = values if len(shape) == 1 else values * (1.5 / shape[-1] ** 0.5)
    return out


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    """Token ids [count]; the same seed gives the same text."""
    return tuple(torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


@dataclass(frozen=True)
class Request:
    """One prompt. ``at_step``: the number of steps run before it is added. ``sampling`` overrides greedy;
    ``stop``: tokens that end the answer."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    at_step: int = 0
    seed: int = 0
    sampling: Mapping[str, object] = field(default_factory=dict)
    stop: tuple[int, ...] = ()

    def message(self) -> AddRequest:
        """What the core is told; all log-probabilities are asked for."""
        defaults = {"temperature": 0.0, "logprobs": VOCAB, "prompt_logprobs": VOCAB, "max_tokens": self.max_tokens}
        params = SamplingParams(**{**defaults, **self.sampling})  # type: ignore[arg-type]
        names = tuple(self.name if i == 0 else f"{self.name}#{i}" for i in range(params.n))
        return AddRequest(names, self.prompt, params, tuple(self.seed + i for i in range(params.n)), self.stop)


@dataclass
class Answer:
    """What came back for one answer."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    steps: list[int] = field(default_factory=list)  # step number of each token
    computed: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def take(self, update: Update, step: int) -> None:
        """Add an update."""
        self.tokens += update.token_ids
        self.steps += [step] * len(update.token_ids)
        self.logprobs += update.logprobs
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        self.finish_reason, self.error = update.finish_reason, update.error
        self.computed = max(self.computed, update.computed_tokens)
        self.preemptions = max(self.preemptions, update.preemptions)
        self.draft_tokens, self.accepted_tokens = update.draft_tokens, update.accepted_tokens


Answers = dict[str, Answer]


class PoisonedRunner:
    """Before every step, overwrites everything in the pools that no later query may see."""

    def __init__(self, inner: Runner, core: EngineCore, fill: float | None) -> None:
        self._inner, self._core, self._fill = inner, core, fill
        self.device = inner.device

    def run(self, plan: StepPlan, sequences: dict[str, Answering]) -> StepResult:
        """Poison, then run."""
        self.poison(plan)
        return self._inner.run(plan, sequences)

    def poison(self, plan: StepPlan) -> None:
        """Keep the retained rows of running requests, as they were before ``plan``; nothing else."""
        for group, pool in enumerate(self._inner.pools):
            keep = torch.zeros(pool.k.shape[2], dtype=torch.bool)
            keep[surviving_slots(self._core, plan, group)] = True
            for plane in pool.planes:
                if self._fill is None:
                    plane.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[plane.itemsize])[:, :, ~keep] = -1
                else:
                    plane[:, :, ~keep] = self._fill if plane.is_floating_point() else 127


def surviving_slots(core: EngineCore, plan: StepPlan, group: int) -> list[int]:
    """Slots of the rows that some query of ``plan`` or later can see, from the rule of visibility."""
    slots: list[int] = []
    planned = {item.request_id: item for item in plan.items}
    children = {name for item in plan.items for name in item.forks}
    for ticket in core.scheduler.running:
        if ticket.request_id in children:
            continue
        item = planned.get(ticket.request_id)
        table: TableStep | object = core.ledger._tables[ticket.request_id][group]
        shape, bound = table.shape, table.bound  # type: ignore[attr-defined]
        computed, columns = ticket.scheduled, table.columns  # type: ignore[attr-defined]
        if item is not None:
            computed, columns = item.start, item.tables[group].read
        rows = {*range(min(bound.sinks, computed)), *range(bound.retained_from(computed), computed)}
        slots += [columns[shape.column(p // shape.page_size)] * shape.page_size + p % shape.page_size for p in rows]
    return slots


@dataclass
class Rig:
    """An engine and its oracle."""

    spec: ModelSpec
    config: ResolvedConfig
    core: EngineCore
    oracle: Decoder
    steps: int = 0

    @property
    def runner(self) -> Runner:
        """The real runner, below the poison."""
        inner = self.core.runner
        while not isinstance(inner, Runner):
            inner = inner._inner  # type: ignore[attr-defined]
        return inner

    def stored(self) -> list[str]:
        """What each layer stores its K and V as."""
        groups = zip(self.config.groups, self.config.demand.dtypes, strict=True)
        of = {layer: dtype for group, dtype in groups for layer in group.layers}
        return [of[layer] for layer in range(len(self.spec.layers))]

    def wrap(self, wrapper: Callable[[StepRunner], StepRunner]) -> None:
        """Put a runner around the present one."""
        self.core.runner = wrapper(self.core.runner)

    def run(
        self,
        requests: Sequence[Request],
        before_step: Callable[[EngineCore, Answers], None] | None = None,
        max_steps: int = 20_000,
    ) -> Answers:
        """Answer requests to the end; ``before_step`` may cancel, preempt or look. Books are checked at the end."""
        answers: Answers = {}
        waiting = sorted(requests, key=lambda r: r.at_step)
        start = self.steps
        while waiting or self.core.has_work:
            while waiting and (waiting[0].at_step <= self.steps - start or not self.core.has_work):
                request = waiting.pop(0)
                message = request.message()
                self.core.add(message)
                answers |= {name: Answer(request.prompt) for name in message.answer_ids}
            if before_step is not None:
                before_step(self.core, answers)
            for update in self.core.step():
                answers[update.answer_id].take(update, self.steps)
            self.steps += 1
            assert self.steps - start < max_steps, "the engine makes no progress"
        self.assert_empty()
        return answers

    def assert_empty(self) -> None:
        """Nobody runs: every page is back and every promise taken back."""
        self.core.scheduler.check()
        for pool in self.core.ledger.stats():
            assert (pool.held, pool.promised, pool.free) == (0, 0, pool.total), f"pages are lost: {pool}"

    @torch.inference_mode()
    def dense(self, tokens: Sequence[int], prompt_tokens: int) -> torch.Tensor:
        """Scores [T, V] of a text in one cold dense run."""
        ids = torch.tensor(tokens)
        attend = attend_all(self.spec, len(ids), prompt_tokens, self.stored())
        return self.oracle.logits(self.oracle.forward(ids, torch.arange(len(ids)), attend))

    def assert_exact(self, answers: Answers, finish: str = "length", scale: float | None = None) -> None:
        """Every score of every answer agrees with the oracle, and greedy tokens do (invariant 1)."""
        for name, answer in answers.items():
            if finish:
                assert answer.finish_reason == finish, f"{name}: {answer.finish_reason} {answer.error}"
            self.assert_answer(name, answer, scale)

    def assert_answer(self, name: str, answer: Answer, scale: float | None = None) -> None:
        """One answer, finished or not, against the oracle."""
        text = [*answer.prompt, *answer.tokens]
        logits = self.dense(text, len(answer.prompt))
        # A row on the edge between two stored values may fall to either side, and the oracle's own fell to one:
        # such rows are few, so that scores agree on the whole.
        exact = set(self.config.demand.dtypes) == {self.config.dtype}
        if scale is None:
            scale = 1e-4 if exact else 2e-2
        tolerance = scale * max(1.0, logits.abs().max().item())
        wanted = logits.log_softmax(-1)
        scored: list[tuple[int, TokenLogprobs]] = []
        if answer.prompt_logprobs is not None:
            assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(answer.prompt), name
            scored += [(p - 1, s) for p, s in enumerate(answer.prompt_logprobs) if s is not None]
        if answer.logprobs:
            assert len(answer.logprobs) == len(answer.tokens), name
            scored += [(len(answer.prompt) - 1 + i, s) for i, s in enumerate(answer.logprobs)]
        if not scored:
            return
        rows = torch.tensor([row for row, _ in scored])
        got = torch.full((len(scored), VOCAB), float("nan"))
        ids = torch.tensor([s.top_ids for _, s in scored])
        got.scatter_(1, ids, torch.tensor([s.top_logprobs for _, s in scored]))
        errors = (got - wanted[rows]).abs().nan_to_num(float("inf")).max(-1).values
        worst, where = errors.max(0)
        position = int(rows[where])
        assert worst <= tolerance, (
            f"{name}: scores after position {position} are {worst:.1e} off (limit {tolerance:.1e})"
        )
        mean = float(errors.mean())
        assert exact or mean <= tolerance / 10, f"{name}: scores are {mean:.1e} off on the whole"
        for row, score in scored:
            assert score.token_id == text[row + 1], f"{name}: the score after position {row} is another token's"
        self._assert_greedy(name, answer, wanted, tolerance)

    @staticmethod
    def _assert_greedy(name: str, answer: Answer, wanted: torch.Tensor, tolerance: float) -> None:
        for i, token in enumerate(answer.tokens):
            row = wanted[len(answer.prompt) - 1 + i]
            best = row.topk(2)
            if best.values[0] - best.values[1] > 2 * tolerance:
                assert token == best.indices[0], f"{name}: token {i} is {token}, the oracle's {int(best.indices[0])}"


def build(
    spec: ModelSpec,
    options: EngineConfig,
    *,
    pages: Callable[[ResolvedConfig], tuple[int, ...]] | None = None,
    kernels: str = "torch",
    fill: str | None = "nan",
    seed: int = 0,
) -> Rig:
    """An engine over random weights, float32 unless ``options`` say otherwise; its oracle is float32 always.
    ``pages`` overrides the pools' sizes; ``fill`` None leaves memory alone."""
    dtype = "float32" if options.dtype == "auto" else options.dtype
    options = replace(options, dtype=dtype, device="cpu", debug=True)
    config = options.resolve(spec, MACHINE)
    if pages is not None:
        config = replace(config, pages=pages(config))
    with mock.patch.dict(os.environ, SASH_KERNELS=kernels):
        weights = {name: w.to(getattr(torch, dtype)) for name, w in random_weights(spec, seed).items()}
        core = assemble(spec, config, weights)
    oracle = Decoder.of(spec, random_weights(spec, seed), OPS["reference"], max_model_len=config.max_model_len)
    rig = Rig(spec, config, core, oracle)
    if fill is not None:
        rig.wrap(lambda inner: PoisonedRunner(inner, core, FILLS[fill]))  # type: ignore[arg-type]
    return rig
