"""The serving benchmark: what it runs in which order, and the record it makes.

Every ratio is of runs that alternate on one machine: sash's server, then the engine alone while the same generator
drives the null server at the pace just seen; sash's server, then each other server. Whoever isn't asked sleeps.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sash.bench.peers.catalogue import PEERS
from sash.bench.peers.environment import Workshop, make_environment
from sash.bench.peers.process import PeerError, Worker
from sash.bench.record import circumstances
from sash.bench.serving import generators
from sash.bench.serving.client import Address, Answer, ClientError, fetch, stream
from sash.bench.serving.generators import LocustRun, Shape, VllmBench, run_locust
from sash.bench.serving.llama import llama_server
from sash.bench.serving.null_server import Recording
from sash.bench.serving.sampling import Sampler
from sash.bench.serving.servers import (
    Launch,
    Server,
    Setting,
    llama_launch,
    null_launch,
    sash_launch,
    vllm_launch,
)
from sash.spec.load import load_spec
from sash.spec.locate import locate
from sash.text.export import tokenizer_files

_ANSWER_S, _GENERATOR_S = 3600.0, 180.0
# Ids that are ordinary pieces of text in the models this is used with.
_FIRST_ID, _LAST_ID = 1000, 30_000
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Rates are of ``requests_each`` requests per place in the concurrency, ``prompt`` and ``output``
    tokens each; ``idle`` clients wait for their stream to begin while others are served; locust runs for
    ``locust_s`` seconds in each mode."""

    model: str = "gemma3-270m"
    concurrency: tuple[int, ...] = (8, 16)
    requests_each: int = 8
    prompt: int = 512
    output: int = 128
    repeats: int = 3
    threads: int = 2
    idle: int = 200
    locust_users: int = 12
    locust_rate: float = 3.0
    locust_s: float = 60.0
    longest: int = 2000
    others: tuple[str, ...] = ("llama-server", "vllm")
    others_at: int = 8

    @property
    def context(self) -> int:
        """Tokens that must fit: vLLM's generator may miss a length by some tokens."""
        return max(self.prompt, self.longest) + max(self.output, 64) + 64

    def shape(self, concurrency: int) -> Shape:
        """The load at a concurrency."""
        return Shape(self.requests_each * concurrency, self.prompt, self.output, concurrency)


class Bench:
    """One measurement in a folder of its own.

    Raises:
        PeerError: something of sash fails; what other servers fail at is told in the record.
    """

    def __init__(self, plan: Plan, folder: Path, clients: Path, peers: Path, locustfile: Path, say: Say) -> None:
        self.plan = plan
        self._folder = folder
        self._say = say
        self._locustfile = locustfile
        self._peers_root = peers
        self._workshop = Workshop(peers, say)
        source = locate(plan.model)
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir(parents=True, exist_ok=True)
        for name, text in tokenizer_files(source, load_spec(source).max_position).items():
            (tokenizer / name).write_text(text, encoding="utf-8")
        self._bench = VllmBench(self._workshop.python(PEERS["vllm"]), tokenizer, folder)
        self._locust = make_environment(clients / "locust", "locust", generators.LOCUST, (), say)
        most = max(*plan.concurrency, plan.others_at)
        self._setting = Setting(source, plan.model, tokenizer, plan.context, most, plan.threads)
        self._seed = 0
        self._random = random.Random(1)

    def run(self) -> dict[str, Any]:
        """Everything, in the record's form."""
        plan = self.plan
        with ExitStack() as stack:
            offline = stack.enter_context(closing(self._offline()))
            self._say("loading sash's server")
            server = stack.enter_context(closing(self._serve(sash_launch(self._setting))))
            single = self._single(server, offline)
            rates = {str(c): self._rates(server, offline, c) for c in plan.concurrency}
            idle = self._idle(server)
            locust, pools = self._mixed(server)
            others, absent = self._others(server)
        return {
            "command": "make load",
            "seed": 1,
            **circumstances(Path(__file__)),
            "plan": asdict(plan),
            "versions": self._versions(),
            "single": single,
            "rates": rates,
            "idle": idle,
            "locust": locust,
            "pools": pools,
            "others": others,
            "absent": absent,
        }

    def run_others(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with the comparison with other servers made anew; it then has a date and commit of its own."""
        self._say("loading sash's server")
        with closing(self._serve(sash_launch(self._setting))) as server:
            others, absent = self._others(server)
        return {**record, "others": {**others, **circumstances(Path(__file__))}, "absent": absent}

    def _offline(self) -> Worker:
        env = {"OMP_NUM_THREADS": str(self.plan.threads)}
        worker = Worker("sash offline", [sys.executable, "-P", "-m", "sash.bench.serving.offline"], env)
        self._say("loading the engine alone")
        requests = sorted(self.plan.concurrency)
        arguments = {"context": self.plan.context, "requests": requests, "threads": self.plan.threads}
        worker.ask("load", _ANSWER_S, model=self.plan.model, **arguments)
        return worker

    def _serve(self, launch: Launch) -> Server:
        return Server(launch, self._folder / f"{launch.name}.log")

    def _prompts(self, count: int) -> list[list[int]]:
        return [[self._random.randint(_FIRST_ID, _LAST_ID) for _ in range(self.plan.prompt)] for _ in range(count)]

    def _load(self, server: Server, shape: Shape, *, lenient: bool = False) -> dict[str, Any]:
        self._seed += 1
        return self._bench.run(server.address, self.plan.model, shape, self._seed, lenient=lenient)

    def _single(self, server: Server, offline: Worker) -> dict[str, Any]:
        """One client on an idle server, beside the engine alone: time to the first token by ``vllm bench serve``; per
        token by a client of our own, which takes less of the cores that it shares with the engine, prompt by prompt."""
        plan, rows = self.plan, []
        for i in range(plan.repeats):
            generated = self._load(server, Shape(8, plan.prompt, plan.output, 1))
            pairs = []
            for prompt in self._prompts(8):
                alone = offline.ask("latency", _ANSWER_S, prompts=[prompt], new_tokens=plan.output)
                times = asyncio.run(stream(server.address, "/v1/completions", self._body(prompt, plan.output))).times_s
                served_s = (times[-1] - times[0]) / (plan.output - 1)
                pairs.append((alone["first_s"], alone["token_s"], served_s))
            first_s, token_s, served_s = map(statistics.median, zip(*pairs, strict=True))
            rows.append(
                {
                    "offline_first_ms": 1000 * first_s,
                    "offline_token_ms": 1000 * token_s,
                    "first_ms": generated["ttft_ms"]["p50"],
                    "token_ms": 1000 * served_s,
                }
            )
            self._say(f"alone, {i + 1} of {plan.repeats}: " + ", ".join(f"{k} {v:.2f}" for k, v in rows[-1].items()))
        return {"runs": rows, **{name: statistics.median(row[name] for row in rows) for name in rows[0]}}

    def _rates(self, server: Server, offline: Worker, concurrency: int) -> dict[str, Any]:
        """The server's rate, and the engine's alone beside the same generator on the null server."""
        shape, rows = self.plan.shape(concurrency), []
        for i in range(self.plan.repeats):
            served = self._load(server, shape)
            recording = self._folder / f"recording-{concurrency}.json"
            asyncio.run(self._record(server.address, concurrency)).save(recording)
            rate = self._beside_null(recording, offline, shape)
            rows.append({"served": served, "offline_rate": rate, "ratio": served["output_rate"] / rate})
            self._say(
                f"concurrency {concurrency}, {i + 1} of {self.plan.repeats}: {served['output_rate']:.0f} tok/s, the "
                f"engine alone {rate:.0f} tok/s beside the generator, ratio {rows[-1]['ratio']:.3f}"
            )
        ratios = [row["ratio"] for row in rows]
        return {"runs": rows, "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}

    async def _record(self, address: Address, concurrency: int) -> Recording:
        """The stream of one of ``concurrency`` clients who start together."""
        answers = [Answer() for _ in range(concurrency)]
        bodies = [self._body(prompt, self.plan.output) for prompt in self._prompts(concurrency)]
        await asyncio.gather(*(stream(address, "/v1/completions", b, a) for a, b in zip(answers, bodies, strict=True)))
        return Recording.of(answers[concurrency // 2])

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.plan.model, "prompt": prompt, **sampling, **options}

    def _beside_null(self, recording: Path, offline: Worker, shape: Shape) -> float:
        """The engine's rate while the generator, which never ends on its own here, drives the null server."""
        concurrency = shape.concurrency or 1
        endless = replace(shape, requests=20 * shape.requests)
        with ExitStack() as stack:
            null = stack.enter_context(closing(self._serve(null_launch(recording))))
            self._seed += 1
            process = self._bench.start(null.address, self.plan.model, endless, self._seed, "null.json")
            stack.callback(_end, process)
            _await_load(null, concurrency)
            prompts = self._prompts(shape.requests)
            answer = offline.ask("batch", _ANSWER_S, requests=concurrency, prompts=prompts, new_tokens=shape.output)
            if process.poll() is not None:
                raise PeerError("the generator ended before the engine alone had: its rate is of another load")
        rate: float = answer["rate"]
        return rate

    def _idle(self, server: Server) -> dict[str, Any]:
        """Decode rate of as many streams as run at once, without and with clients who wait for theirs to begin."""
        rows = []
        for i in range(self.plan.repeats):
            plain = asyncio.run(self._stream_rate(server.address, 0))
            crowded = asyncio.run(self._stream_rate(server.address, self.plan.idle))
            rows.append({"rate": plain, "rate_with_idle": crowded, "ratio": crowded / plain})
            self._say(f"{self.plan.idle} idle streams, {i + 1} of {self.plan.repeats}: {rows[-1]['ratio']:.3f}")
        return {"clients": self.plan.idle, "runs": rows, "ratio": statistics.median(row["ratio"] for row in rows)}

    async def _stream_rate(self, address: Address, idle: int) -> float:
        """Tokens a second that all seats give between the moments when the last has begun and the first has ended."""
        seats, tokens = self._setting.requests, 4 * self.plan.output
        answers = [Answer() for _ in range(seats)]
        bodies = [self._body(prompt[:16], tokens) for prompt in self._prompts(seats + idle)]
        loop = asyncio.get_running_loop()
        busy = [
            loop.create_task(stream(address, "/v1/completions", body, answer))
            for body, answer in zip(bodies, answers, strict=False)
        ]
        while not all(answer.events for answer in answers) and not any(task.done() for task in busy):
            await asyncio.sleep(0.02)
        waiting = [loop.create_task(stream(address, "/v1/completions", body)) for body in bodies[seats:]]
        await asyncio.sleep(0.2)  # the crowd comes
        before, started = sum(len(a.events) for a in answers), loop.time()
        while not any(task.done() for task in busy):
            await asyncio.sleep(0.01)
        rate = (sum(len(a.events) for a in answers) - before) / (loop.time() - started)
        for task in waiting:
            task.cancel()
        found = await asyncio.gather(*busy, *waiting, return_exceptions=True)
        if bad := [error for error in found if isinstance(error, ClientError)]:
            raise bad[0]
        return rate

    def _mixed(self, server: Server) -> tuple[dict[str, Any], dict[str, Any]]:
        """Locust with prompts of mixed lengths and users who leave, in both modes; pools over time in each."""
        plan = self.plan
        closed = LocustRun(plan.locust_users, plan.locust_s, output=min(plan.output, 64), longest=plan.longest)
        figures, pools = {}, {}
        for run in (closed, replace(closed, rate=plan.locust_rate)):
            self._say(f"locust, {run.mode} loop, {run.seconds:g} s")
            with Sampler(server.address) as sampler:
                figures[run.mode] = run_locust(
                    self._locust, self._locustfile, server.address, plan.model, run, self._folder
                )
            pools[run.mode] = sampler.rows
        return figures, pools

    def _others(self, server: Server) -> tuple[dict[str, Any], dict[str, str]]:
        """sash's server and others in turn."""
        absent: dict[str, str] = {}
        runs: dict[str, list[dict[str, Any]]] = {"sash": []}
        shape = self.plan.shape(self.plan.others_at)
        with ExitStack() as stack:
            running = {"sash": server}
            for name in self.plan.others:
                try:
                    self._say(f"loading {name}")
                    running[name] = stack.enter_context(closing(self._serve(self._other(name))))
                    runs[name] = []
                    running[name].sleep()  # until its turn comes
                except PeerError as error:
                    absent[name] = str(error)
                    self._say(f"{name} is absent: {error}")
            for _ in range(self.plan.repeats):
                for name, other in running.items():
                    if name in absent:
                        continue
                    other.wake()
                    try:
                        # llama-server sends nothing where an answer is control tokens: the generator counts a failure.
                        runs[name].append(self._load(other, shape, lenient=name != "sash"))
                    except PeerError as error:
                        if name == "sash":
                            raise
                        absent[name] = str(error)
                        self._say(f"{name} is absent: {error}")
                    else:
                        self._say(f"{name}: {runs[name][-1]['output_rate']:.0f} tok/s at {shape.concurrency}")
                    finally:
                        other.sleep()
            server.wake()
        rates = {name: statistics.median(r["output_rate"] for r in found) for name, found in runs.items() if found}
        return {"concurrency": shape.concurrency, "runs": runs, "rates": rates}, absent

    def _other(self, name: str) -> Launch:
        setting = replace(self._setting, requests=self.plan.others_at)
        if name == "vllm":
            return vllm_launch(setting, self._workshop)
        return llama_launch(setting, llama_server(self._peers_root, self._say))

    def _versions(self) -> dict[str, str]:
        from sash import __version__
        from sash.bench.serving.llama import VERSION

        pins = dict(pin.split("==") for pin in (*PEERS["vllm"].requirements, *generators.LOCUST))
        return {"sash": __version__, "llama-cpp-python": VERSION, **pins}


def _await_load(null: Server, clients: int) -> None:
    """Wait until the generator has loaded and asks. Raises PeerError when it doesn't come to it."""
    deadline = time.monotonic() + _GENERATOR_S
    while asyncio.run(fetch(null.address, "/v1/models"))["open"] < clients:
        if time.monotonic() > deadline:
            raise PeerError(f"the generator has not asked the null server within {_GENERATOR_S:g} s")
        time.sleep(0.1)


def _end(process: subprocess.Popen[str]) -> None:
    """End a generator with all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
