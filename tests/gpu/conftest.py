"""For tests on a GPU that processes share: none keeps memory that its allocator has cached."""

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _cached_memory_goes_back() -> Iterator[None]:
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
