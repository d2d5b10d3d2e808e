"""Users of the completions endpoint who read the stream: locust -f deploy/load/locustfile.py --host http://127.0.0.1:8000

Without --rate every user asks again as soon as it is answered (closed loop). With --rate requests come at random
moments, that many a second on average, whether earlier ones are answered or not (open loop).

Reported beside the requests themselves: first (ms to the first token), gap (ms from one token to the next; its
average is what matters, each of them is one entry), whole (ms to the end of answers that weren't cancelled) and
cancelled (ms until the user left). Prompts have 20 to --longest random tokens, short ones more often.
"""

from __future__ import annotations

import json
import math
import random
import time
from typing import Any

import gevent
from gevent.pool import Pool
from locust import FastHttpUser, events, task

SHORTEST = 20
# Ids that are ordinary words or pieces of words in every model this is used with.
FIRST_ID, LAST_ID = 1000, 30_000


@events.init_command_line_parser.add_listener
def options(parser: Any) -> None:
    """What --help shows under custom arguments."""
    parser.add_argument("--model", default="", help="Name of the served model; none: the server's own.")
    parser.add_argument("--rate", type=float, default=0.0, help="Requests a second (open loop); 0: closed loop.")
    parser.add_argument("--longest", type=int, default=2000, help="Tokens of the longest prompt.")
    parser.add_argument("--output", type=int, default=64, help="Tokens of the longest answer.")
    parser.add_argument("--cancel-share", type=float, default=0.1, help="Part of the requests that leave early.")
    parser.add_argument("--seed", type=int, default=1, help="Of lengths, prompts and moments.")


class Reader(FastHttpUser):
    """Asks, reads, and sometimes leaves."""

    network_timeout = 600.0
    connection_timeout = 60.0

    def on_start(self) -> None:
        self.options = self.environment.parsed_options
        self.random = random.Random(f"{self.options.seed} {self.environment.runner.user_count}")
        self.pool = Pool()

    @task
    def ask(self) -> None:
        """One request, or in the open loop the next one's moment."""
        if not self.options.rate:
            self.read()
            return
        gevent.sleep(self.random.expovariate(self.options.rate))
        self.pool.spawn(self.read)

    def on_stop(self) -> None:
        self.pool.join(timeout=60)

    def body(self) -> dict[str, Any]:
        """A prompt whose length's logarithm is uniform, and an answer of up to --output tokens."""
        length = round(math.exp(self.random.uniform(math.log(SHORTEST), math.log(self.options.longest))))
        body = {
            "prompt": [self.random.randint(FIRST_ID, LAST_ID) for _ in range(length)],
            "max_tokens": self.random.randint(max(1, self.options.output // 4), self.options.output),
            "ignore_eos": True,
            "stream": True,
        }
        return body | ({"model": self.options.model} if self.options.model else {})

    def read(self) -> None:
        """Send a request and read its events, all or some."""
        body = self.body()
        leaves = self.random.random() < self.options.cancel_share
        limit = self.random.randint(1, body["max_tokens"]) if leaves else 1 << 30
        started = time.perf_counter()
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True, name="request") as got:
            if got.status_code == 429:
                got.success()
                self.note("turned away", started)
                gevent.sleep(1)
                return
            if got.status_code != 200:
                got.failure(f"status {got.status_code}: {got.text or got.error}"[:300])
                return
            told = self.events(got.stream, started, limit)
            got.stream.release()  # closes the connection of a stream that was left
            if told:
                got.failure(told)
            elif leaves:
                self.note("cancelled", started)
            else:
                self.note("whole", started)

    def events(self, stream: Any, started: float, limit: int) -> str:
        """Read up to ``limit`` events; what was wrong with the stream, or nothing."""
        seen, last = 0, started
        while data := bytes(stream.readline(b"\n\n")):
            if not data.startswith(b"data: "):
                continue  # a comment, which keeps the line
            if data == b"data: [DONE]\n\n":
                return ""
            event = json.loads(data[6:])
            if "error" in event:
                return str(event["error"])[:200]
            now = time.perf_counter()
            self.note("gap" if seen else "first", last, now)
            seen, last = seen + 1, now
            if seen >= limit:
                return ""
        return "the stream ended without [DONE]"

    def note(self, name: str, started: float, now: float | None = None) -> None:
        """One measurement."""
        took_ms = 1000 * ((now or time.perf_counter()) - started)
        self.environment.events.request.fire(
            request_type="SSE", name=name, response_time=took_ms, response_length=0, exception=None, context={}
        )
