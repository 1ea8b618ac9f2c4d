"""The GEMM for up to 128 tokens on a GPU with wgmma, against float64; skipped elsewhere."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_gemm_checks as checks_module
from gpu_linear_checks import Checks

SLOW = (checks_module.check_every_kind, checks_module.check_every_kind_of_int8)
CHECKS = (
    checks_module.check_kinds,
    checks_module.check_int8_kinds,
    *(pytest.param(check, marks=pytest.mark.slow) if check in SLOW else check for check in checks_module.CHECKS),
)


@pytest.fixture(scope="module")
def seed() -> int:
    """Of all inputs; kernels of the kinds that it samples are ready."""
    seed = int.from_bytes(os.urandom(3), "little")
    checks_module.prepare_sample(seed)
    return seed


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_gemm(check: Callable[[Checks, int], None], seed: int) -> None:
    torch.manual_seed(seed)
    checks = Checks()
    check(checks, seed)
    assert checks.done
    assert not checks.failed, f"seed {seed}: " + "\n".join(checks.failed[:20])


@pytest.mark.parametrize("equal", [True, False], ids=["equal parts", "list"])
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_parts_are_ended_alike_beside_another_stream(seed: int, rows: int, equal: bool) -> None:
    """Blocks that wait for parts of their strip, while other kernels keep some of them from running at once."""
    from vllm_exl3.cuda import gemm
    from vllm_exl3.cuda.gemm_plan import GemmPartition
    from vllm_exl3.cuda.timing import random_weights
    from vllm_exl3.ops.shards import Shard

    shard, partition = Shard(8, 2, 4096, 4096, 0, 4096), GemmPartition(128 if equal else 131, equal)
    tensors = random_weights(shard, rows)
    x = torch.randn(rows, 4096, device="cuda").half()
    out, first = x.new_empty((rows, 4096)), None
    side, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").half()
    for turn in range(100):
        with torch.cuda.stream(side):
            if turn % 3:
                square @ square
        out.fill_(float("nan"))
        gemm.gemm(x, *tensors, None, (shard,), out, partition=partition)
        first = out.clone() if first is None else first
        assert torch.equal(out, first)


def test_scratch_is_bounded_and_returned(seed: int) -> None:
    from vllm_exl3.cuda import gemm
    from vllm_exl3.cuda.timing import random_weights
    from vllm_exl3.ops.shards import Shard

    shard = Shard(8, 2, 8192, 28672, 0, 28672)
    tensors = random_weights(shard, 1)
    x = torch.randn(128, 8192, device="cuda").half()
    out = x.new_empty((128, 28672))
    gemm.gemm(x, *tensors, None, (shard,), out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gemm.gemm(x, *tensors, None, (shard,), out)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= 48 << 20
