from __future__ import annotations

import re
from pathlib import Path

import pytest

from sash.doctor.engine import EXAMINED
from sash.doctor.finding import Finding, Status, exit_code, ok, skipped
from sash.doctor.render import as_document, as_text, summary
from sash.doctor.symptoms import ALIASES, CHECKS, SYMPTOMS, order_of, ordered
from sash.spec.errors import ConfigError

BAD = Finding("mask-edge", Status.FAIL, "distance 7 is seen", "off by one", "mend it")


def test_every_symptom_asks_known_checks_and_every_check_is_asked_for_some() -> None:
    asked = {name for order in SYMPTOMS.values() for name in order}
    assert asked == CHECKS.keys()
    assert set(EXAMINED) <= CHECKS.keys()
    assert set(ALIASES.values()) <= SYMPTOMS.keys()


def test_the_guide_s_table_is_the_order() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|[^|]*\|(.*)\|$", guide, re.MULTILINE)
    told = {name: tuple(re.findall(r"`([\w-]+)`", checks)) for name, checks in rows}
    assert {name: told.get(name) for name in SYMPTOMS} == SYMPTOMS


def test_order_is_the_symptom_s() -> None:
    found = [ok("no-copies", "none"), ok("mask-edge", "right"), ok("reach", "far")]
    assert [f.name for f in ordered(found, order_of("edge-facts"))] == ["reach", "mask-edge"]
    assert [f.name for f in ordered(found, order_of(None))] == ["mask-edge", "reach", "no-copies"]
    assert order_of("oom") == order_of("memory")


def test_unknown_symptom_names_the_known() -> None:
    with pytest.raises(ConfigError, match="'hungry' is unknown; use repeats, memory"):
        order_of("hungry")


def test_exit_code() -> None:
    assert exit_code([ok("reach", "far"), skipped("recall", "no")]) == 0
    assert exit_code([]) == exit_code([skipped("recall", "no")]) == 2
    assert summary([skipped("recall", "no")]) == "Nothing could be looked at here."
    assert exit_code([ok("reach", "far"), BAD]) == 1
    assert exit_code([Finding("kernels", Status.WARN, "slow")]) == 1


def test_text_and_document() -> None:
    text = as_text([ok("reach", "far"), BAD, skipped("recall", "no model")], "tiny")
    parts = [
        "FAIL mask-edge",
        "evidence  distance 7 is seen",
        "cause     off by one",
        "fix       mend it",
        "ok   reach",
    ]
    assert [part for part in parts if part not in text] == []
    assert sorted(parts, key=text.index) == parts
    assert text.endswith("2 checks, 1 found something: mask-edge. Begin with the first.")
    assert summary([ok("reach", "far")]) == "1 check, nothing wrong."
    document = as_document([BAD], "tiny")
    assert document["exit_code"] == 1 and document["subject"] == "tiny"
    assert document["findings"] == [
        {
            "question": CHECKS["mask-edge"],
            "name": "mask-edge",
            "status": "fail",
            "evidence": "distance 7 is seen",
            "cause": "off by one",
            "fix": "mend it",
        }
    ]
