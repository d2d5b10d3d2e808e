"""All checks of a model that sash runs: an exam of the engine, and what its settings tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from sash.doctor.copies import NAME as COPIES
from sash.doctor.copies import Copies, copy_finding
from sash.doctor.exact import Errors, Floor, dense, departs, errors, floor_of, noise_of
from sash.doctor.exam import Exam, Factory, prepare
from sash.doctor.finding import Finding, Status, ok, skipped
from sash.doctor.mask import BY_POSITION, EDGE, Sights, mask_findings
from sash.doctor.memory import NAME as BOUNDED
from sash.doctor.memory import memory_finding
from sash.doctor.positions import NAME as POSITIONS
from sash.doctor.positions import position_finding
from sash.doctor.reference import Reference
from sash.doctor.rows import (
    ISOLATED,
    SURVIVE,
    crossed_finding,
    foreign_losses,
    only_edge,
    own_losses,
    rows_finding,
)
from sash.doctor.settings import chunk_finding, setting_findings
from sash.doctor.timing import KERNELS, TIME, kernel_finding, time_finding
from sash.doctor.watch import Loss, Probe, Watch
from sash.engine.build import build_core, probe
from sash.engine.runner import Runner, StepResult
from sash.spec.config import EngineConfig
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.spec.model import ModelSpec

EXACT, CHUNK_EDGE = "exact", "chunk-edge"
EXAMINED = (BOUNDED, COPIES, SURVIVE, EDGE, BY_POSITION, POSITIONS, EXACT, CHUNK_EDGE, ISOLATED, KERNELS, TIME)
# Scores that are typically off by more than this many nats are no rounding of 8-bit weights.
_WILD = 2.0
Say = Callable[[str], None]


def _quiet(_stage: str) -> None:
    pass


def examine_model(model: str | os.PathLike[str], options: EngineConfig, say: Say = _quiet) -> list[Finding]:
    """Check a model with these options. ``say`` is told what happens now.

    Raises:
        ModelError, ConfigError: the model or the options can't work.
    """
    spec = load_spec(locate(model))
    return diagnose(spec, lambda small: build_core(model, small).core, options, say)


def diagnose(spec: ModelSpec, factory: Factory, options: EngineConfig, say: Say = _quiet) -> list[Finding]:
    """Check a model whose engines ``factory`` makes, with these options."""
    settings = setting_findings(spec, options.resolve(spec, probe(options.device)))
    say("loading the model")
    exam = prepare(spec, factory, options)
    if isinstance(exam, str):
        return [*settings, *(skipped(name, exam) for name in EXAMINED)]
    return merged(settings, examine(exam, say))


def merged(settings: list[Finding], examined: list[Finding]) -> list[Finding]:
    """Both; where both have a check, what was seen counts."""
    names = {f.name for f in examined}
    return [*(f for f in settings if f.name not in names), *examined]


def examine(exam: Exam, say: Say = _quiet) -> list[Finding]:
    """Everything that running the engine shows."""
    say("one request past its windows")
    core, sizes = exam.core, exam.sizes
    assert isinstance(core.runner, Runner)
    runner, reference = core.runner, Reference.of(core.runner)
    sights, copies = Sights(_queries(exam)), Copies(_last(exam))
    (answer,), alone = exam.ask([(sizes.prompt, sizes.decoded)], _both(copies, sights))
    memory = memory_finding(core.config, alone.notes, sizes.prompt, core.ledger)
    copied = copy_finding(copies.found, alone, core.config.groups)
    masks = mask_findings(sights.found)
    slots = alone.memories[_first_group(core.config.groups)].slot_of("exam-0")
    positions = position_finding(runner, reference, answer.text, slots, sizes.longest)
    structural = [memory, copied, *masks, positions]
    if answer.error:
        failed = [f for f in structural if _failed(f)] or [_broken(answer.error)]
        rest = [name for name in EXAMINED if name not in {f.name for f in failed}]
        return [*failed, *(skipped(name, f"explained by {failed[0].name}: {answer.error}") for name in rest)]
    if root := _uproots(structural, alone):
        rest = [name for name in EXAMINED if name not in (memory.name, copied.name)]
        return [memory, copied, *(skipped(name, f"explained by {root}") for name in rest)]

    say("requests side by side")
    company, together = exam.ask(sizes.company, score_prompts=False)
    say("a prompt in chunks")
    prompts, chunked = exam.ask([(sizes.long, 1)]) if sizes.long else ([], None)
    say("the dense reference")
    apart = [alone, *([chunked] if chunked else [])]
    crossed = foreign_losses(together, apart)
    lost = own_losses(apart if crossed else [*apart, together])
    if _failed(masks[0]) and only_edge([*lost, *crossed], core.config.groups):
        lost, crossed = [], []
    structural.insert(2, rows_finding(lost, [*apart, together]))
    plain = dense(reference, answer)
    scored = [errors(answer, plain), *(errors(a, dense(reference, a)) for a in (*company, *prompts))]
    noise = noise_of(plain, dense(reference.jittered(core.config.quantization != "none"), answer))
    findings = [*structural, *_score_findings(exam, scored, noise, len(company), crossed, structural)]
    if chunked is not None:
        rows_seen = max(count for note in chunked.notes for _, _, count in note.items)
        steps = f" ({sizes.long} tokens took {len(chunked.notes)} steps)"
        findings.append(chunk_finding(exam.spec, rows_seen, steps))
    say("where the time goes")
    return [*findings, kernel_finding(exam), time_finding(exam)]


def _last(exam: Exam) -> int:
    """The last position of the request that runs alone: its last token's row is never computed."""
    return exam.sizes.prompt + exam.sizes.decoded - 2


def _queries(exam: Exam) -> list[int]:
    """Positions that are looked at: the last ones, in different places of a page, and one before each ring wraps."""
    last, demand = _last(exam), exam.core.config.demand
    shapes = [demand.bound_shape(g.span.bind(exam.sizes.prompt)) for g in exam.core.config.groups if g.bounded]
    wraps = [(shape.pin + shape.ring) * demand.page_size for shape in shapes]
    return [last, last - 1, last - demand.page_size // 2 - 1, *(rows - 1 for rows in wraps)]


def _uproots(structural: Sequence[Finding], alone: Watch) -> str:
    """The fault after which nothing else can be judged, because rows lie elsewhere or pages are gone; or nothing."""
    memory, copied = structural[:2]
    if _failed(copied) and (alone.moved or alone.replaced):
        return copied.name
    grown = alone.notes[0].pool_bytes != alone.notes[-1].pool_bytes
    lost = any(pool.held for pool in alone.core.ledger.stats())
    return memory.name if _failed(memory) and (grown or lost) else ""


def _score_findings(
    exam: Exam, scored: list[Errors], noise: Errors, company: int, crossed: list[Loss], structural: list[Finding]
) -> list[Finding]:
    """Scores past the window, at the edges of chunks and in company, each beside the dense reference.

    ``scored``: of the request that ran alone, of ``company`` others, and of a long prompt if there was one; ``noise``:
    of the first by rounding.
    """
    spans = [g.span for g in exam.core.config.groups if g.span.window]
    within = min((span.window for span in spans), default=8)
    alone, others, long = scored[0], scored[1 : 1 + company], scored[1 + company :]
    floor = floor_of(scored, within, noise)
    root = next((f.name for f in structural if f.status is Status.FAIL and f.name != BOUNDED), "")
    typical = floor_of(scored, within, Errors(())).typical
    seen = _apart(alone, within, typical)
    exact = _exact_finding(seen, typical, departs(alone, within, len(alone.values), floor), _normal(exam, noise), root)
    edge = _edge_finding(exam, long[0], floor, root) if long else skipped(CHUNK_EDGE, "no prompt has two chunks here")
    if crossed:
        return [exact, edge, crossed_finding(crossed)]
    root = root or next((f.name for f in (exact, edge) if _failed(f)), "")
    return [exact, edge, _company_finding(others, floor, root)]


def _apart(alone: Errors, within: int, typical: float) -> str:
    worst, where = alone.worst(within, len(alone.values))
    return (
        f"log-probabilities of {alone.count} positions beside a dense run without a cache: typically "
        f"{typical:.2g} apart in the first {within}, at most {worst:.2g} behind (position {where})"
    )


def _normal(exam: Exam, noise: Errors) -> str:
    """Why scores differ a little on a healthy engine."""
    config = exam.core.config
    weights = config.dtype if config.quantization == "none" else config.quantization
    rows = "/".join(dict.fromkeys(config.demand.dtypes))
    typical, most = floor_of([], 0, noise).typical, noise.worst(0, len(noise.values))[0]
    return (
        f"that is normal, and rounding: {weights} weights, {rows} K and V. As much noise moves the dense run's own "
        f"scores by {typical:.2g} typically, {most:.2g} at most (each time the worst of a position's best tokens)"
    )


def _exact_finding(seen: str, typical: float, off: list[int], normal: str, root: str) -> Finding:
    """``off``: positions behind the window that are far off."""
    fix = "SASH_KERNELS=reference sash doctor MODEL tells whether the C++ kernels are at fault; then please report it"
    if typical > _WILD:
        cause = "the engine computes something else than the model, even where windows hide nothing"
        return skipped(EXACT, f"explained by {root}: {seen}") if root else Finding(EXACT, Status.FAIL, seen, cause, fix)
    if not off:
        return ok(EXACT, f"{seen}; {normal}")
    if root:
        return skipped(EXACT, f"explained by {root}: {seen}")
    return Finding(
        EXACT,
        Status.FAIL,
        f"{seen}; {len(off)} of those behind are far off, from position {off[0]} on",
        "past the window the engine computes something else than the model; rows, mask and positions look right, so "
        "the attention itself is at fault",
        fix,
    )


def _edge_finding(exam: Exam, long: Errors, floor: Floor, root: str) -> Finding:
    chunk = exam.core.config.chunk
    off = departs(long, chunk, len(long.values), floor)
    text = f"a prompt of {exam.sizes.long} tokens in chunks of {chunk}"
    seen = f"{text}: {len(off)} of its rows behind the edge are off"
    if not off:
        return ok(CHUNK_EDGE, f"{seen} (rounding moves log-probabilities by {floor.typical:.2g})")
    if root:
        return skipped(CHUNK_EDGE, f"explained by {root}: {seen}")
    return Finding(
        CHUNK_EDGE,
        Status.FAIL,
        f"{seen}, from position {off[0]} on",
        "rows of the chunk before are lost at the edge: a chunk must see the window that ends where it starts",
        "attend over the stored window and the chunk together, and write after that (sash.engine.step)",
    )


def _company_finding(others: list[Errors], floor: Floor, root: str) -> Finding:
    every = Errors(tuple(v for e in others for v in e.values))
    off, count = len(departs(every, 0, len(every.values), floor)), every.count
    seen = f"{len(others)} requests of different lengths side by side: {off} of {count} rows are off"
    if not off:
        return ok(ISOLATED, f"{seen}, and none lost a row to another")
    if root:
        return skipped(ISOLATED, f"explained by {root}: {seen}")
    return Finding(
        ISOLATED,
        Status.FAIL,
        f"{seen}, and none alone",
        "requests of a batch mix: one reads rows or lengths of another",
        "give each request its own length, table and segment (sash.engine.step)",
    )


def _both(*probes: Probe) -> Probe:
    def run(watch: Watch, plan: object, sequences: object, result: StepResult) -> None:
        for each in probes:
            each(watch, plan, sequences, result)  # type: ignore[arg-type]

    return run


def _first_group(groups: tuple[object, ...]) -> int:
    """The group of layer 0."""
    return next(i for i, g in enumerate(groups) if 0 in g.layers)  # type: ignore[attr-defined]


def _failed(finding: Finding) -> bool:
    return finding.status is Status.FAIL


def _broken(error: str) -> Finding:
    return Finding(
        EXACT,
        Status.FAIL,
        f"a request of the exam ended with an error: {error}",
        "the engine can't run this model as it is set up",
        "sash generate MODEL --debug shows where",
    )
