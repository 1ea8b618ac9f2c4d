"""The CUDA kernels on a GPU, against float64; skipped where torch sees none."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_linear_checks as checks_module
from gpu_linear_checks import Checks
from gpu_linear_crowded import check_crowded

CHECKS = (
    checks_module.check_kinds,
    pytest.param(checks_module.check_every_kind, marks=pytest.mark.slow),
    checks_module.check_scratch,
    checks_module.check_fast,
    checks_module.check_layers,
    checks_module.check_large,
    checks_module.check_magnitudes,
    checks_module.check_streams_and_graphs,
    check_crowded,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_linear(check: Callable[[Checks, int], None]) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    torch.manual_seed(seed)
    checks = Checks()
    check(checks, seed)
    assert checks.done
    assert not checks.failed, f"seed {seed}: " + "\n".join(checks.failed[:20])


def test_scratch_is_returned() -> None:
    from vllm_exl3.cuda import linear
    from vllm_exl3.cuda.timing import random_weights
    from vllm_exl3.ops.shards import Shard, pack_shards

    shard = Shard(8, 2, 4096, 4096, 0, 4096)
    tensors, layout = random_weights(shard, 1), pack_shards([shard])
    x = torch.randn(16, 4096, device="cuda").half()
    linear.linear(x, *tensors, None, layout)
    before = torch.cuda.memory_allocated()
    for rows in (1, 4, 9, 16):
        linear.linear(x[:rows], *tensors, None, layout)
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    linear.linear(torch.randn(512, 4096, device="cuda").half(), *tensors, None, layout)
    assert torch.cuda.max_memory_allocated() - before <= 96 << 20
