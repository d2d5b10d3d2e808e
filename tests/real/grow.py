"""One long request, step by step: what it holds and what the process holds. Prints JSON when run.

python -m tests.real.grow 32000
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sash.engine.build import build_core
from sash.engine.frontend import Frontend
from sash.spec.config import EngineConfig
from sash.spec.footprint import page_bytes
from sash.spec.sampling import SamplingParams

TOPICS = Path(__file__).parents[1] / "fixtures" / "gemma3_270m_topics_ids.json"


@dataclass(frozen=True)
class Growth:
    """After a step that ended at ``tokens`` tokens."""

    tokens: int
    window_bytes: int
    private_window_pages: int
    resident_bytes: int


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def grow(prompt_tokens: int, *, decode_steps: int = 8, chunk: int = 512) -> list[Growth]:
    """A prompt of Gemma in bf16, then some decode steps; one entry per step."""
    options = EngineConfig(
        dtype="bfloat16",
        max_model_len=prompt_tokens + decode_steps + 2,
        kv_cache_memory_bytes=1_000_000_000,
        max_num_batched_tokens=max(chunk, 16),
        chunked_prefill_size=chunk,
    )
    built = build_core("gemma3-270m", options)
    core, demand = built.core, built.config.demand
    window = next(group for group in demand.groups if group.bounded)
    bytes_of_page = page_bytes(window, demand.page_size, demand.dtypes[demand.groups.index(window)])
    text = json.loads(TOPICS.read_text())["ids"]
    ids = (text * (prompt_tokens // len(text) + 1))[:prompt_tokens]
    request = Frontend(built.spec, None, 0).open(
        ids, SamplingParams(max_tokens=decode_steps + 2, temperature=0, ignore_eos=True)
    )
    core.add(request.message)
    answer_id = request.message.answer_ids[0]
    steps: list[Growth] = []
    while not steps or steps[-1].tokens < prompt_tokens + decode_steps:
        updates = core.step()
        steps.append(
            Growth(
                tokens=max(update.computed_tokens for update in updates),
                window_bytes=core.ledger.request_pages(answer_id)[window.name] * bytes_of_page,
                private_window_pages=core.ledger.private_pages(answer_id)[window.name],
                resident_bytes=resident_bytes(),
            )
        )
    return steps


if __name__ == "__main__":
    print(json.dumps([asdict(step) for step in grow(int(sys.argv[1]))]))
