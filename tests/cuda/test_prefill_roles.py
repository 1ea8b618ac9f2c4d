"""The prefill GEMM with all its roles on the host: copies, products, ends of tiles in warps of their own, cut tiles."""

import ctypes
import math
import shutil

import numpy as np
import pytest
import torch

from tests.cuda.host_kernels import build
from vllm_exl3.cuda import prefill_plan
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill_plan import PrefillArgs, plan_prefill
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards

GPU = GpuLimits("sm_90a", 2, 232448)
"""Few multiprocessors, so that thread blocks take several tiles and share the last ones."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(build("prefill", tmp_path_factory.mktemp("prefill_roles"))))


def _aligned(size: int) -> np.ndarray:
    raw = np.full(size + 512, 0xFF, np.uint8)
    return raw[-raw.ctypes.data % 256 :][:size]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize(("tokens", "rows", "ranges"), [(256, 270, 0), (192, 200, None), (256, 37, 2)])
def test_the_kernels_on_the_host(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int, ranges: int | None
) -> None:
    one = prefill_plan._Kernel("prefill", strip=1, pairs=1, producers=128, stages=12, resident=1)
    monkeypatch.setattr(prefill_plan, "kernel", lambda tokens, limits: one)
    shards = (Shard(8, 2, 256, 256, 0, 256), Shard(6, 2, 256, 128, 20, 100))
    rng = np.random.default_rng(rows)
    trellis = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, sum(s.trellis_words for s in shards), dtype=np.int16))
    suh, svh = (torch.from_numpy(rng.uniform(0.5, 1.5, size).astype(np.float16)) for size in (512, 384))
    x, bias = torch.from_numpy(rng.standard_normal((rows, 216)).astype(np.float16)), torch.randn(356)
    plan = plan_prefill.__wrapped__(shards, rows, 216, GPU, tokens, ranges)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    scratch, words = _aligned(plan.scratch), _aligned(2 * trellis.numel())
    words[:] = trellis.numpy().view(np.uint8)
    out = np.full((rows, 356), math.nan, np.float32)
    for name, offset in plan.scratch_parts.items():
        setattr(arguments, name, scratch.ctypes.data + offset)
    for shard, at in zip(arguments.shards, plan.offsets, strict=False):
        shard.trellis = words.ctypes.data + 2 * at.trellis
        shard.suh, shard.svh = suh.data_ptr() + 2 * at.suh, svh.data_ptr() + 2 * at.svh
    arguments.x, arguments.x_stride, arguments.x_type = x.data_ptr(), 216, 0
    arguments.out, arguments.out_stride, arguments.out_type = out.ctypes.data, 356, 2
    arguments.bias, arguments.bias_type = bias.data_ptr(), 2
    transform = plan.transform
    library.transform(ctypes.byref(arguments), transform.grid[0], transform.threads, transform.shared)
    library.multiply(ctypes.byref(arguments), plan.grid, plan.threads, plan.shared)
    if plan.finish is not None:
        library.finish(ctypes.byref(arguments), *plan.finish)
    expected = linear_reference(x.float(), trellis, suh, svh, bias, tuple(pack_shards(shards)))
    error = (torch.from_numpy(out).double() - expected.double()).norm() / expected.double().norm()
    assert error <= 5e-4
