"""Fixtures of the op tests."""

from collections.abc import Iterator

import pytest

from tests.ops.cpu_cases import ISAS
from vllm_exl3.cpu.library import library


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU runs, in turn."""
    assert library().exl3_select_isa(request.param.encode()) == 0
    yield request.param
    library().exl3_select_isa(b"auto")
