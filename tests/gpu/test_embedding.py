"""Embeddings and n-gram rows on a GPU, against the CPU reference to the bit; skipped where torch sees none."""

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_embedding import checks


def test_every_kind_of_row_on_the_device_and_in_host_memory() -> None:
    results = list(checks())
    assert len(results) > 300
    assert not [name for name, right in results if not right]
