"""How errors list what is wrong."""

from __future__ import annotations

from sash.spec.errors import enumerated


def test_a_long_list_shows_twenty_and_counts_the_rest() -> None:
    names = [f"t{i}" for i in range(22)]
    assert enumerated(names[:2]) == "t0, t1"
    assert enumerated(names[:20], "; ") == "; ".join(names[:20])
    assert enumerated(names) == ", ".join(names[:20]) + ", … and 2 more"
