"""Checks of a running server: sash's tells its pools in /stats, any OpenAI-compatible one shows its outside."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sash.doctor.client import Client, Reply, ServerError, count_of, fields, first
from sash.doctor.finding import Finding, Status, ok, skipped
from sash.doctor.outside import LINE, Timed, filler, latency_finding, line_finding, recall_finding
from sash.doctor.statistics import grown_finding, stats_findings, work_findings

ALIVE, ISOLATED, BOUNDED = "alive", "batch-isolated", "cache-bounded"
Say = Callable[[str], None]
# Tokens of an answer that is watched, and seconds between two looks at the pools.
_ANSWER = 160
_LOOK_S = 0.05
# Log-probabilities of one prompt differ by rounding when others run beside it; a foreign row moves them by more.
_MIXED = 1.0


@dataclass
class Speaker:
    """A server as ``sash.doctor.outside.Outside`` knows engines."""

    client: Client
    model: str
    tokens_per_word: float = 1.0

    @classmethod
    def of(cls, client: Client, model: str) -> Speaker:
        """One that knows how many tokens a word takes there, where the server tells."""
        words = 40
        usage = fields(cls(client, model).whole(filler(words), 1).get("usage"))
        return cls(client, model, max((count_of(usage.get("prompt_tokens")) or words) / words, 1.0))

    def body(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion."""
        return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}

    def timed(self, prompt: str, max_tokens: int) -> Timed:
        """Answer and take the time; the typical gap between tokens."""
        answer = self.client.stream("/v1/completions", self.body(prompt, max_tokens))
        gaps = sorted(answer.gaps_s)
        tokens = answer.prompt_tokens or len(prompt.split())
        return Timed(tokens, answer.first_s, gaps[len(gaps) // 2] if gaps else 0.0)

    def answer(self, prompt: str, max_tokens: int) -> str:
        """Answer."""
        choice = self.complete(prompt, max_tokens)
        return str(choice.get("text") or "")

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> Mapping[str, Any]:
        """The first choice of an answer.

        Raises:
            ServerError: there is none.
        """
        return first(self.whole(prompt, max_tokens, **more)["choices"])

    def whole(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """An answer's body.

        Raises:
            ServerError: there is none.
        """
        reply = self.client.call("/v1/completions", self.body(prompt, max_tokens, **more))
        if reply.status != 200 or not first(fields(reply.body).get("choices")):
            raise ServerError(f"{self.client.url}/v1/completions answered {reply.status}: {str(reply.body)[:300]}")
        body: dict[str, Any] = reply.body
        return body


def examine_server(client: Client, say: Say = lambda _: None) -> list[Finding]:
    """Ask a server, and probe it with a few requests.

    Raises:
        ServerError: nobody answers there, or a key is needed.
    """
    models = client.call("/v1/models")
    if models.status in (401, 403):
        raise ServerError(f"{client.url} wants a key: give --api-key, or set OPENAI_API_KEY")
    stats = _stats(client)
    if stats is None:
        return _foreign(client, models, say)
    if stats["state"] != "ready" or stats["engine"] is None:
        return [_not_ready(client, stats)]
    alive = ok(ALIVE, f"sash {stats['versions'].get('sash', '')} at {client.url}, {stats['model']['names'][0]}: ready")
    speaker = Speaker.of(client, stats["model"]["names"][0])
    window = max((p["window"] for p in stats["engine"]["pools"]), default=0)
    limit = stats["model"]["max_model_len"]
    findings = [alive, *stats_findings(stats)]
    say("one answer past the windows")
    answer = min(_ANSWER, limit // 3)
    findings.append(_watched(speaker, stats, min(max(window + 64, 256), max(limit - answer - 64, 8)), answer))
    outside, _ = _outside(speaker, window or None, limit, say)
    after = _stats(client)
    work = [] if after is None or after["engine"] is None else work_findings(_over_its_life(after))
    return [*findings, *outside, *work]


def _over_its_life(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics whose processes' CPU is a share of the server's whole life, as that of its steps is; /stats tells that
    of the last moment, which a probe has filled."""
    uptime_s = max(stats["uptime_s"], 1e-9)
    processes = [{**p, "cpu_ratio": p["cpu_s"] / uptime_s} for p in stats["machine"]["processes"]]
    return {**stats, "machine": {**stats["machine"], "processes": processes}}


def _stats(client: Client) -> dict[str, Any] | None:
    """/stats of a sash server; None where it is none."""
    reply = client.call("/stats")
    body = reply.body
    if reply.status != 200 or not isinstance(body, dict) or "sash" not in fields(body.get("versions")):
        return None
    if not ("state" in body and "engine" in body and fields(body.get("model")).get("names")):
        raise ServerError(f"{client.url}/stats tells less than this version of sash reads; use the server's own sash")
    return body


def _not_ready(client: Client, stats: Mapping[str, Any]) -> Finding:
    health = client.call("/health")
    fail = stats["state"] == "dead"
    return Finding(
        ALIVE,
        Status.FAIL if fail else Status.WARN,
        f"state {stats['state']}; /health answers {health.status}; {stats['engine_restarts']} restarts",
        "the engine's process has ended" if fail else "the server takes no requests now",
        "sash doctor --log FILE on the server's log tells why" if fail else "wait until /ready answers 200",
    )


def _watched(speaker: Speaker, before: Mapping[str, Any], prompt: int, answer_tokens: int) -> Finding:
    """Look at the pools while one answer passes the windows."""
    looks: list[Mapping[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        text = filler(prompt, speaker.tokens_per_word)
        answer = pool.submit(speaker.complete, text, answer_tokens, ignore_eos=True)
        while not answer.done():
            stats = _stats(speaker.client)
            if stats is not None and stats["engine"] is not None:
                looks.append(stats)
            time.sleep(_LOOK_S)
        answer.result()
    time.sleep(0.6)  # reports are at most half a second old
    return grown_finding(before, looks, _stats(speaker.client))


def _outside(speaker: Speaker, window: int | None, limit: int | None, say: Say) -> tuple[list[Finding], list[Timed]]:
    """What any server shows; and the times by length."""
    longest = max(32, min(limit or 4096, 4096) * 6 // 10 - 64)
    lengths = sorted({32, min(512, longest), longest})
    say("latency by length")
    latency, times = latency_finding(speaker, lengths)
    say("recall and company")
    far = min(2 * window, longest) if window else longest
    what = f"the window is {window}" if window else "no window is told"
    recall = recall_finding(speaker, 16, far, what)
    return [latency, recall, _company(speaker)], times


def _foreign(client: Client, models: Reply, say: Say) -> list[Finding]:
    entry = first(fields(models.body).get("data"))
    name = entry.get("id")
    if models.status != 200 or not isinstance(name, str):
        raise ServerError(
            f"{client.url} is no OpenAI-compatible server: /v1/models answered {models.status}; give its address, such "
            f"as http://127.0.0.1:8000"
        )
    alive = ok(ALIVE, f"{client.url} serves {name}; it is not sash, so only its outside is seen")
    findings, times = _outside(Speaker.of(client, name), None, count_of(entry.get("max_model_len")), say)
    usage = _told_usage(client)
    return [alive, *findings, ok(LINE, usage) if usage else line_finding(times, None)]


def _told_usage(client: Client) -> str:
    """What a server's metrics say of its cache, if it has such."""
    try:
        reply = client.call("/metrics")
    except ServerError:
        return ""
    found = re.search(
        r"^(\S*(?:kv_cache_usage|gpu_cache_usage|token_usage)\S*)\s+(\S+)$", str(reply.body), re.MULTILINE
    )
    return (
        f"/metrics tells {found[1].partition('{')[0]} = {found[2]}; its growth by request is not told" if found else ""
    )


def _company(speaker: Speaker) -> Finding:
    """The first tokens' log-probabilities of one prompt, alone and beside others."""
    ratio = speaker.tokens_per_word
    prompt = f"Once upon a time, {filler(40, ratio)}"

    def ask(text: str) -> list[float]:
        scores = fields(speaker.complete(text, 4, logprobs=1).get("logprobs")).get("token_logprobs")
        return [s for s in scores if isinstance(s, int | float)] if isinstance(scores, list) else []

    try:
        alone = ask(prompt)
        if not alone:
            return skipped(ISOLATED, "the server tells no log-probabilities")
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(ask, f"{n} {filler(20 * n, ratio)}") for n in range(1, 4)]
            beside = pool.submit(ask, prompt).result()
            for other in others:
                other.result()
    except ServerError as error:
        return skipped(ISOLATED, f"requests side by side could not be compared: {error}")
    off = abs(alone[0] - beside[0]) if beside else math.inf
    seen = f"the first token's log-probability alone and beside three others: {off:.2f} apart"
    if off <= _MIXED:
        return ok(ISOLATED, seen)
    return Finding(
        ISOLATED,
        Status.FAIL,
        seen,
        "requests of a batch mix: one reads rows or lengths of another",
        "sash doctor MODEL --symptom batch shows which rows are lost",
    )
