"""What a sash server's /stats tells: pools, queues, what was refused, what failed, and where time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sash.doctor.finding import Finding, Status, ok, skipped
from sash.doctor.rule import most_pages
from sash.doctor.settings import PoolFacts, split_finding
from sash.spec.config import MAX_DRAFT
from sash.spec.span import Span, SpanKind

BOUNDED, QUEUE, PREEMPTIONS, REJECTED, FAILURES, TIME, LINE = (
    "cache-bounded",
    "queue",
    "preemptions",
    "rejected",
    "failures",
    "time",
    "memory-line",
)
Stats = Mapping[str, Any]
# Why a server turns requests away that are well formed.
_OWN_REASONS = ("overloaded", "timeout", "failed", "not_ready", "draining")
_BOUNDED = {kind.value for kind in (SpanKind.SLIDING, SpanKind.CHUNKED, SpanKind.REFERENCE)}


def stats_findings(stats: Stats) -> list[Finding]:
    """Everything that one look at the statistics tells."""
    engine = stats["engine"]
    if engine is None:
        return [skipped("pool-split", "the engine has told nothing yet")]
    return [
        split_finding(pool_facts(engine), engine["max_model_len"], engine["max_num_seqs"]),
        _used(engine),
        _line(engine),
        _queue(stats),
        _preemptions(engine),
        _rejected(stats["requests"]),
    ]


def work_findings(stats: Stats) -> list[Finding]:
    """What the work since the start tells, that of a probe among it."""
    return [_failures(stats), _time(stats)]


def pool_facts(engine: Mapping[str, Any]) -> list[PoolFacts]:
    """The pools of a report."""
    return [
        PoolFacts(p["name"], p["kind"] in _BOUNDED, p["num_pages"], p["longest_pages"], p["page_bytes"])
        for p in engine["pools"]
    ]


def _limit(pool: Mapping[str, Any], length: int) -> int | None:
    """Most pages that a request needs in this pool; None where it grows. Drafts may keep some rows more."""
    if pool["kind"] not in _BOUNDED:
        return None
    span = Span(SpanKind(pool["kind"]), pool["window"], pool["sinks"])
    return most_pages(span, length, pool["page_size"], MAX_DRAFT)


def _used(engine: Mapping[str, Any]) -> Finding:
    for pool in engine["pools"]:
        most, length = _limit(pool, engine["max_model_len"]), engine["max_model_len"]
        if most is not None and pool["longest_pages"] > most:
            return Finding(
                "window-used",
                Status.WARN,
                f"{pool['name']} layers ({pool['span']}) store {pool['longest_pages']} pages of {length} tokens, and "
                f"{most} would do",
                "a window mask over full storage saves no memory: an option keeps rows that nothing sees",
                "start without --disable-hybrid-swa-memory and --hybrid-kvcache-ratio",
            )
    told = ", ".join(f"{p['name']} {p['longest_pages']} pages" for p in engine["pools"])
    return ok("window-used", f"a request of {engine['max_model_len']} tokens stores: {told}")


def _line(engine: Mapping[str, Any]) -> Finding:
    slope = sum(p["page_bytes"] / p["page_size"] for p in engine["pools"] if p["kind"] not in _BOUNDED)
    every = sum(p["page_bytes"] / p["page_size"] for p in engine["pools"])
    return ok(LINE, f"{slope / 1024:.2f} KiB a token past the windows, {every / 1024:.2f} before")


def _queue(stats: Stats) -> Finding:
    engine = stats["engine"]
    waiting, why = engine["waiting"], engine["waiting_for"]
    queue = stats["latency"]["queue_s"]
    seen = f"{engine['running']} answers run, {waiting} wait{f' for {next(iter(why))}' if why else ''}"
    if queue["count"]:
        seen += f"; half of the last {queue['count']} requests waited {queue['p50']:.3f} s, "
        seen += f"one in twenty {queue['p95']:.2f} s or more"
    if not waiting or "turn" in why:
        return ok(QUEUE, seen)
    if "seats" in why:
        cause, fix = "all seats are taken", f"--max-num-seqs {2 * engine['max_num_seqs']}"
    else:
        pool = max(engine["pools"], key=lambda p: (p["held_pages"] + p["promised_pages"]) / max(p["num_pages"], 1))
        cause = f"the {pool['name']} pool is short: {pool['free_pages'] - pool['promised_pages']} pages are left"
        fix = "--kv-cache-memory-bytes with more, or lower --max-model-len and max_tokens"
    return Finding(QUEUE, Status.WARN, seen, cause, fix)


def _preemptions(engine: Mapping[str, Any]) -> Finding:
    count = engine["preemptions"]
    if not count:
        return ok(PREEMPTIONS, "none since the start")
    pool = max(engine["pools"], key=lambda p: p["peak_pages"] / max(p["num_pages"], 1))
    return Finding(
        PREEMPTIONS,
        Status.WARN,
        f"{count} answers gave their pages up and were computed again; the {pool['name']} pool held "
        f"{pool['peak_pages']} of {pool['num_pages']} pages at its peak",
        f"the {pool['name']} pool is too small for the answers that run at once",
        "--kv-cache-memory-bytes with more, or a lower --max-num-seqs",
    )


def _rejected(requests: Mapping[str, Any]) -> Finding:
    turned = {reason: count for reason, count in requests["rejected"].items() if count}
    told = ", ".join(f"{count} {reason}" for reason, count in turned.items()) or "none"
    own = [reason for reason in turned if reason in _OWN_REASONS]
    if not own:
        return ok(REJECTED, f"requests turned away since the start: {told}")
    fixes = {
        "overloaded": "--max-waiting with more, or another replica",
        "timeout": "--request-timeout-s with more, or shorter answers",
    }
    return Finding(
        REJECTED,
        Status.WARN,
        f"requests turned away since the start: {told}",
        f"the server refused work: {', '.join(own)}",
        next((fixes[r] for r in own if r in fixes), "sash doctor --log FILE on the server's log tells which"),
    )


def _failures(stats: Stats) -> Finding:
    engine, finished = stats["engine"], stats["requests"]["finished"]
    bad = {
        "failed steps": engine["failed_steps"],
        "restarts of the engine": stats["engine_restarts"],
        "answers that ended with an error": finished.get("error", 0),
        "answers that took too long": finished.get("timeout", 0),
    }
    found = ", ".join(f"{count} {what}" for what, count in bad.items() if count)
    if not found:
        return ok(FAILURES, f"none in {engine['steps']} steps and {stats['uptime_s']:.0f} s")
    return Finding(FAILURES, Status.FAIL, found, "steps or requests failed", "sash doctor --log FILE tells the reasons")


def _time(stats: Stats) -> Finding:
    engine = stats["engine"]
    busy = engine["busy_s"] / max(stats["uptime_s"], 1e-9)
    uses = ", ".join(
        f"{p['process']} {p['cpu_ratio']:.0%} of a processor, {p['resident_bytes'] / 2**20:.0f} MiB"
        for p in stats["machine"]["processes"]
        if p["cpu_ratio"] is not None
    )
    step = engine["busy_s"] / max(engine["steps"], 1) * 1000
    rows = engine["computed_tokens"] / max(engine["steps"], 1)
    seen = f"steps take {busy:.0%} of the time, {step:.1f} ms and {rows:.1f} rows each on average"
    return ok(TIME, f"{seen}; {uses}" if uses else seen)


def grown_finding(before: Stats, looks: Sequence[Stats], after: Stats | None) -> Finding:
    """Pages of one request while its answer grew, and after it."""
    held_most = _held_most(before, looks, after)
    if not held_most:
        return skipped(BOUNDED, "no look at the pools fell into the answer")
    engine = before["engine"]
    told = []
    for pool in engine["pools"]:
        pages, limit = held_most.get(pool["name"], 0), _limit(pool, engine["max_model_len"])
        told.append(f"{pool['name']} {pages} of at most {pool['longest_pages']} pages")
        if limit is not None and pages > limit:
            return Finding(
                BOUNDED,
                Status.FAIL,
                f"{pool['name']} layers ({pool['span']}): one request held {pages} pages, and {limit} would do",
                "pages that no later query can see are kept: the cache grows in a line with the text",
                "start without --disable-hybrid-swa-memory; else sash doctor MODEL --symptom memory shows more",
            )
    if after is not None and after["engine"] is not None and not after["engine"]["running"]:
        held = {p["name"]: p["held_pages"] for p in after["engine"]["pools"] if p["held_pages"]}
        if held:
            return Finding(
                BOUNDED,
                Status.FAIL,
                f"nothing runs, and {', '.join(f'{n} {count} pages' for n, count in held.items())} are still held",
                "pages of ended requests don't come back: memory grows with every request",
                "sash doctor MODEL --symptom memory shows which step keeps them",
            )
    resident = _resident(before, after)
    return ok(BOUNDED, f"one answer held: {', '.join(told)}; all came back{resident}")


def _held_most(before: Stats, looks: Sequence[Stats], after: Stats | None) -> dict[str, int]:
    """Most pages of a request by pool, as seen; of an answer too quick to be seen what the pools' peaks tell."""
    seen: dict[str, int] = {}
    for pool in (pool for look in looks for pool in look["engine"]["pools"]):
        seen[pool["name"]] = max(seen.get(pool["name"], 0), *pool["requests"].values(), 0)
    if any(seen.values()):
        return seen
    if after is None or after["engine"] is None or before["engine"]["running"]:
        return {}
    pairs = zip(before["engine"]["pools"], after["engine"]["pools"], strict=True)
    return {b["name"]: b["peak_pages"] for a, b in pairs if b["peak_pages"] > a["peak_pages"]}


def _resident(before: Stats, after: Stats | None) -> str:
    sizes = [
        p["resident_bytes"] for s in (before, after) if s for p in s["machine"]["processes"] if p["process"] == "core"
    ]
    return (
        f"; the core's memory went from {sizes[0] / 2**20:.0f} to {sizes[1] / 2**20:.0f} MiB" if len(sizes) == 2 else ""
    )
