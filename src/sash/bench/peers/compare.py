"""``sash bench peers``: equal outputs first, then sash and each peer in turn, case by case."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sash.bench import ceiling
from sash.bench.cases import Case, Timing, figures, line
from sash.bench.ceiling import Precision
from sash.bench.peers.catalogue import Peer, worker_env
from sash.bench.peers.environment import SCRIPTS, Say, Workshop
from sash.bench.peers.process import PeerError, Worker
from sash.bench.record import circumstances
from sash.bench.text import topics_ids
from sash.spec.errors import SashError
from sash.spec.load import load_spec
from sash.spec.locate import ModelSource, locate
from sash.text.load import load_tokenizer

GATE_TOKENS = 1024
# Seconds: the first load of a peer may compile, and a slow peer needs minutes for a long prompt.
_LOAD_S, _ANSWER_S = 1200.0, 1800.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare. ``options`` are sash's engine options; a peer whose runs of one case took ``patience_s``
    together isn't repeated further there."""

    model: str
    peers: tuple[Peer, ...]
    cases: tuple[Case, ...]
    repeats: int
    threads: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    patience_s: float = 120.0

    @property
    def context(self) -> int:
        """Tokens that must fit into an engine at once."""
        return max(GATE_TOKENS + 16, *(case.tokens for case in self.cases))

    @property
    def arguments(self) -> dict[str, Any]:
        """What every engine is built with, sash among them."""
        requests = max(case.requests for case in self.cases)
        return {"threads": self.threads, "context": self.context, "requests": requests}


# Makes an engine's worker (None: sash's own) and the path of the model in its form.
Launch = Callable[[Peer | None], tuple[Worker, str]]


class Contest:
    """sash's worker and those of the peers that are still in; ``absent`` says why the others are not.

    Raises:
        SashError: sash itself fails, at any time.
    """

    def __init__(self, plan: Plan, launch: Launch, say: Say) -> None:
        self.plan = plan
        self.absent: dict[str, str] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self._launch, self._say = launch, say
        self._workers: dict[str, Worker] = {}

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the peers that take part."""
        return tuple(name for name in self._workers if name != "sash")

    def open(self) -> None:
        """Start sash, then every peer that can be had."""
        self._start("sash", None, self.plan.options)
        for peer in self.plan.peers:
            try:
                self._start(peer.name, peer, {})
            except PeerError as error:
                self._drop(peer.name, str(error))

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()

    def gate(self, text: list[int]) -> dict[str, float]:
        """Perplexities of one text by name. A peer that finds it more or less likely than sash, beyond its
        tolerance, leaves: it doesn't run the same model."""
        out = {"sash": self._perplexity("sash", text)}
        if not math.isfinite(out["sash"]):
            raise SashError(f"sash's perplexity of the text is {out['sash']}: nothing is timed; see sash generate")
        for peer in self.plan.peers:
            if peer.name not in self._workers:
                continue
            try:
                found = out[peer.name] = self._perplexity(peer.name, text)
            except PeerError as error:
                self._drop(peer.name, str(error))
                continue
            if not abs(found / out["sash"] - 1) <= peer.tolerance:  # nor may it be NaN
                self._drop(
                    peer.name,
                    f"perplexity {found:.3f} against sash's {out['sash']:.3f}, further apart than "
                    f"{100 * peer.tolerance:.0f} %: it isn't timed",
                )
        return out

    def time(self, case: Case, text: list[int]) -> dict[str, list[Timing]]:
        """Runs of one case by name: sash before every run of a peer, so that both meet the same machine."""
        prompts = case.prompts(text)
        runs: dict[str, list[Timing]] = {"sash": []}
        spent = dict.fromkeys(self.present, 0.0)
        for _ in range(self.plan.repeats):
            if not self.present:
                runs["sash"].append(self._run("sash", case, prompts))
            for name in self.present:
                if spent[name] > self.plan.patience_s:
                    continue
                runs["sash"].append(self._run("sash", case, prompts))
                started = time.monotonic()
                try:
                    runs.setdefault(name, []).append(self._run(name, case, prompts))
                except PeerError as error:
                    self._drop(name, f"{case.name(case.kinds[-1])}: {error}")
                spent[name] += time.monotonic() - started
        if not runs["sash"]:
            runs["sash"].append(self._run("sash", case, prompts))
        return runs

    def _start(self, name: str, peer: Peer | None, options: Mapping[str, Any]) -> None:
        worker, model = self._launch(peer)
        try:
            self._say(f"loading {name}")
            arguments = {**self.plan.arguments, "options": dict(options)}
            self.loaded[name] = worker.ask("load", _LOAD_S, model=model, **arguments)
        except BaseException:
            worker.close()
            raise
        self._workers[name] = worker

    def _drop(self, name: str, reason: str) -> None:
        self.absent[name] = reason
        self._say(f"{name} is absent: {reason}")
        if name in self._workers:
            self._workers.pop(name).close()

    def _perplexity(self, name: str, text: list[int]) -> float:
        scores = self._workers[name].ask("score", _ANSWER_S, tokens=text)["nll"]
        return math.exp(sum(scores) / len(scores))

    def _run(self, name: str, case: Case, prompts: list[list[int]]) -> Timing:
        answer = self._workers[name].ask("run", _ANSWER_S, prompts=prompts, new_tokens=case.new_tokens)
        return Timing(answer["prefill_s"], answer["decode_s"])


def launcher(plan: Plan, workshop: Workshop, source: ModelSource) -> Launch:
    """Real workers: sash in this Python, each peer in its own."""

    def launch(peer: Peer | None) -> tuple[Worker, str]:
        script = str(SCRIPTS / "worker.py")
        if peer is None:
            env = {"OMP_NUM_THREADS": str(plan.threads)}
            return Worker("sash", [sys.executable, script, "adapter_sash"], env), plan.model
        python = workshop.python(peer)
        model = workshop.model(peer, source)
        env = worker_env(peer, workshop.place(peer), plan.threads)
        return Worker(peer.name, [str(python), script, peer.adapter], env), str(model)

    return launch


def run(plan: Plan, root: Path, say: Say = print, launch: Launch | None = None) -> dict[str, Any]:
    """Compare as ``plan`` says, with environments below ``root``; returns the record.

    Raises:
        ModelError: the model can't be found.
        SashError: sash itself fails.
    """
    source = locate(plan.model)
    spec = load_spec(source)
    text = topics_ids(load_tokenizer(source.path), plan.context)
    contest = Contest(plan, launch or launcher(plan, Workshop(root, say), source), say)
    try:
        contest.open()
        perplexity = contest.gate(text[:GATE_TOKENS])
        say(f"perplexity of {GATE_TOKENS} tokens: " + ", ".join(f"{k} {v:.3f}" for k, v in perplexity.items()))
        top = ceiling.measure_apart(plan.threads)
        precision = Precision(**contest.loaded["sash"]["settings"]["precision"])
        found: list[dict[str, Any]] = []
        for case in plan.cases:
            timings = contest.time(case, text)
            found += figures(case, timings, lambda case, kind: case.ceiling(kind, top, spec, precision))
            for figure in found[-len(case.kinds) :]:
                say(line(figure))
    finally:
        contest.close()
    return {
        "command": "sash bench peers",
        # Nothing is drawn at random: greedy answers to a text that Python brings along.
        "seed": None,
        **circumstances(Path(__file__)),
        "model": plan.model,
        "repeats": plan.repeats,
        "threads": plan.threads,
        "engines": contest.loaded,
        "absent": contest.absent,
        "perplexity": perplexity,
        "ceiling": asdict(top),
        "figures": found,
    }
