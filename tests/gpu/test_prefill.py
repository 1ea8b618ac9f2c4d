"""The prefill kernel on a GPU with wgmma, against float64; skipped elsewhere."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_prefill_checks as checks_module
from gpu_linear_checks import Checks

CHECKS = (
    checks_module.check_kinds,
    *(pytest.param(check, marks=pytest.mark.slow) if check is checks_module.check_every_kind else check
      for check in checks_module.CHECKS),
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_prefill(check: Callable[[Checks, int], None]) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    torch.manual_seed(seed)
    checks = Checks()
    check(checks, seed)
    assert checks.done
    assert not checks.failed, f"seed {seed}: " + "\n".join(checks.failed[:20])


@pytest.mark.parametrize(("rows", "tokens", "ranges"), [(64, None, None), (100, None, None), (40, 64, 131)])
def test_parts_are_ended_alike_beside_another_stream(rows: int, tokens: int | None, ranges: int | None) -> None:
    """Blocks that wait for parts of their tile, while other kernels keep some of them from running at once."""
    from vllm_exl3.cuda import prefill
    from vllm_exl3.cuda.timing import random_weights
    from vllm_exl3.ops.shards import Shard

    shard = Shard(8, 2, 4096, 4096, 0, 4096)
    tensors = random_weights(shard, rows)
    x = torch.randn(rows, 4096, device="cuda").half()
    out, first = x.new_empty((rows, 4096)), None
    side, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").half()
    for turn in range(100):
        with torch.cuda.stream(side):
            if turn % 3:
                square @ square
        out.fill_(float("nan"))
        prefill.prefill(x, *tensors, None, (shard,), out, tokens=tokens, ranges=ranges)
        first = out.clone() if first is None else first
        assert torch.equal(out, first)


@pytest.mark.parametrize("least", [0.0, 6e-8, 1e-5])
def test_channels_with_next_to_no_scale_may_hold_anything(least: float) -> None:
    """Against the same input in float32, which another kernel rotates."""
    from vllm_exl3.cuda import prefill
    from vllm_exl3.cuda.timing import random_weights
    from vllm_exl3.ops.shards import Shard

    shard = Shard(8, 2, 1024, 1024, 0, 1024)
    trellis, suh, svh = random_weights(shard, 1)
    suh[256:512] = least
    x = torch.randn(130, 1024, device="cuda").bfloat16()
    x[::2, 256:512] *= 1e5
    found, expected = x.new_empty((130, 1024)), torch.empty((130, 1024), device="cuda")
    prefill.prefill(x, trellis, suh, svh, None, (shard,), found)
    prefill.prefill(x.float(), trellis, suh, svh, None, (shard,), expected)
    assert (found.float() - expected).norm() <= 4e-3 * expected.norm()


def test_scratch_is_bounded_and_returned() -> None:
    from vllm_exl3.cuda import prefill
    from vllm_exl3.cuda.timing import random_weights
    from vllm_exl3.ops.shards import Shard

    shard = Shard(8, 2, 14336, 1024, 0, 1024)
    tensors = random_weights(shard, 1)
    x = torch.randn(6000, 14336, device="cuda").half()
    out = x.new_empty((6000, 1024))
    prefill.prefill(x[:10], *tensors, None, (shard,), out[:10])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prefill.prefill(x, *tensors, None, (shard,), out)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= 128 << 20


@pytest.mark.parametrize("mebibytes", [16, 64])
def test_dense_weights_take_what_was_allowed_and_go(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> None:
    """vLLM profiles memory by a forward pass and sees the allocator's peak: all scratch has to come from there."""
    from vllm_exl3.cuda import reconstruct
    from vllm_exl3.cuda.timing import random_weights
    from vllm_exl3.ops import backends
    from vllm_exl3.ops.shards import Shard, pack_shards

    monkeypatch.setenv("VLLM_EXL3_RECONSTRUCT_MB", str(mebibytes))
    shard = Shard(8, 2, 4096, 14336, 0, 14336)
    tensors = random_weights(shard, 1)
    x = torch.randn(64, 4096, device="cuda").half()
    reconstruct.linear(x, *tensors, None, pack_shards([shard]))  # compiles, and makes cuBLAS's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    counted = backends.reconstructed_bytes()
    out = reconstruct.linear(x, *tensors, None, pack_shards([shard]))
    assert backends.reconstructed_bytes() - counted == 2 * 4096 * 14336
    peak = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    assert mebibytes // 2 << 20 <= peak <= mebibytes + 1 << 20
    assert torch.cuda.memory_allocated() - before <= (out.numel() * 2 + (1 << 20))
