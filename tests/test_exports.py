from __future__ import annotations

import importlib.metadata

import pytest

import sash


def test_public_names() -> None:
    assert sash.__all__ == ["LLM", "RequestOutput", "SamplingParams", "SashError", "__version__"]
    assert dir(sash) == sorted(sash.__all__)


@pytest.mark.parametrize("name", sash.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(sash, name) is not None


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Engine'; it exports LLM, RequestOutput"):
        _ = sash.Engine


def test_version_is_the_distribution_s() -> None:
    assert importlib.metadata.version("sash-llm") == sash.__version__
