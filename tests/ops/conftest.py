from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sash.ops import native

NATIVE, NOTE = native.load()


@pytest.fixture(params=native.ISAS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The C++ kernels on each instruction set that the processor has."""
    if NATIVE is None:
        pytest.skip(NOTE)
    best = NATIVE.isa()
    try:
        NATIVE.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield NATIVE
    NATIVE.set_isa(best)
