"""The prefill GEMM with all its roles on the host: copies, products, ends of tiles in warps of their own, cut tiles."""

import ctypes
import math
import shutil

import numpy as np
import pytest
import torch

from tests.cuda.host_kernels import HostKernels, build
from vllm_exl3.cuda import prefill_plan
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill_plan import PrefillArgs, plan_prefill
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return build("prefill", tmp_path_factory.mktemp("prefill_roles"))


def _aligned(size: int) -> np.ndarray:
    raw = np.full(size + 512, 0xFF, np.uint8)
    return raw[-raw.ctypes.data % 256 :][:size]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize(
    ("tokens", "rows", "ranges", "multiprocessors", "second", "dtype"),
    [
        (256, 270, 0, 2, 6, np.float32),
        (192, 200, None, 2, 8, np.float32),
        (256, 37, 2, 2, 6, np.float32),
        (128, 101, 3, 3, 6, np.float32),
        (128, 128, 8, 8, 8, np.float32),
        (64, 150, 3, 4, 8, np.float32),
        (64, 150, 5, 7, 6, np.float32),
        (256, 269, 0, 2, 6, np.float16),
        (192, 200, 0, 2, 8, np.float16),
    ],
)
def test_the_kernels_on_the_host(
    library: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    rows: int,
    ranges: int | None,
    multiprocessors: int,
    second: int,
    dtype: type,
) -> None:
    blocks = 1 if tokens > 128 else 2  # Hadamard blocks of a thread block, which has no others in its cluster
    one = prefill_plan._Kernel("prefill", n_blocks=blocks, pairs=blocks, producers=128, stages=12, resident=1)
    monkeypatch.setattr(prefill_plan, "kernel", lambda tokens, limits: one)
    shards = (Shard(8, 2, 256, 256, 0, 256), Shard(second, 2, 256, 128, 20, 100))
    rng = np.random.default_rng(rows)
    trellis = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, sum(s.trellis_words for s in shards), dtype=np.int16))
    suh, svh = (torch.from_numpy(rng.uniform(0.5, 1.5, size).astype(np.float16)) for size in (512, 384))
    sizes = 2.0 ** rng.integers(-3, 4, (rows, 1))  # no two tiles have the same scales
    x, bias = torch.from_numpy((rng.standard_normal((rows, 216)) * sizes).astype(np.float16)), torch.randn(356)
    # Few multiprocessors, so that thread blocks take several tiles and share the last ones.
    plan = plan_prefill.__wrapped__(shards, rows, 216, GpuLimits("sm_90a", multiprocessors, 232448), tokens, ranges)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    scratch, words = _aligned(plan.scratch), _aligned(2 * trellis.numel())
    words[:] = trellis.numpy().view(np.uint8)
    out = np.full((rows, 360), math.nan, dtype)  # so aligned that whole Hadamard blocks leave in vectors
    for name, offset in plan.scratch_parts.items():
        setattr(arguments, name, scratch.ctypes.data + offset)
    for shard, at in zip(arguments.shards, plan.offsets, strict=False):
        shard.trellis = words.ctypes.data + 2 * at.trellis
        shard.suh, shard.svh = suh.data_ptr() + 2 * at.suh, svh.data_ptr() + 2 * at.svh
    arguments.x, arguments.x_stride, arguments.x_type = x.data_ptr(), 216, 0
    arguments.out, arguments.out_stride, arguments.out_type = out.ctypes.data, 360, 2 if dtype == np.float32 else 0
    arguments.bias, arguments.bias_type = bias.data_ptr(), 2
    transform = plan.transform
    library.transform(ctypes.byref(arguments), transform.grid[0], transform.threads, transform.shared)
    ended = plan.finish is None and arguments.ranges > 0
    if ended and not arguments.whole_tiles and arguments.range_k_blocks < 4:
        # A block whose neighbours never come gives up, and leaves outputs alone.
        out[:] = 7
        library.multiply(ctypes.byref(arguments), 1, plan.threads, plan.shared)
        assert (out == 7).all()
        out[:] = math.nan
        library.transform(ctypes.byref(arguments), transform.grid[0], transform.threads, transform.shared)
    library.multiply(ctypes.byref(arguments), plan.grid, plan.threads, plan.shared)
    assert (plan.finish is None) == (tokens <= 128 or not arguments.ranges)
    if plan.finish is not None:
        library.finish(ctypes.byref(arguments), *plan.finish)
    expected = linear_reference(x.float(), trellis, suh, svh, bias, tuple(pack_shards(shards)))
    assert np.isnan(out[:, 356:]).all()
    error = (torch.from_numpy(out[:, :356]).double() - expected.double()).norm() / expected.double().norm()
    assert error <= 5e-4
    if not ended:
        return
    # Blocks ran one after the other, so that the last part's ended all that others had given up. Counts that are full
    # already let each end its own share.
    first = out.copy()
    out[:] = math.nan
    library.multiply(ctypes.byref(arguments), plan.grid, plan.threads, plan.shared)
    np.testing.assert_array_equal(out, first)
