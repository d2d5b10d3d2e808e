"""The real models, healthy as they are, give doctor nothing to find."""

from __future__ import annotations

import pytest
from tests.real_models import real_model

from sash.doctor.engine import examine_model
from sash.doctor.finding import Finding, Status
from sash.spec.config import EngineConfig

pytestmark = [pytest.mark.real, pytest.mark.slow]


def by_status(found: list[Finding], *statuses: Status) -> dict[str, str]:
    return {f.name: f.evidence for f in found if f.status in statuses}


@pytest.mark.parametrize("stored", ["auto", "int8"])
@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_nothing_is_found(name: str, stored: str) -> None:
    real_model(name)
    found = examine_model(name, EngineConfig(kv_cache_dtype=stored, max_model_len=4096))
    assert by_status(found, Status.WARN, Status.FAIL) == {}
    windows = {"mask-edge", "chunk-and-window", "short-text"}
    assert by_status(found, Status.SKIPPED).keys() == (windows if name == "smollm2-135m" else set())


def test_a_ratio_from_the_books_is_found() -> None:
    real_model("gemma3-270m")
    options = EngineConfig(swa_full_tokens_ratio=0.8, chunked_prefill_size=64, kv_cache_memory_bytes=1 << 30)
    found = examine_model("gemma3-270m", options)
    assert by_status(found, Status.WARN, Status.FAIL).keys() == {"pool-split", "chunk-and-window"}
    assert "distance 511 is seen, distance 512 is not" in by_status(found, Status.OK)["mask-edge"]
