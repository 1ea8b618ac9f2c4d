"""The fast mode of prefill: its mapping, its bound, and the kernels themselves, compiled for the host.

What the host runs is the device's source, thread by thread, against the same arithmetic in PyTorch.
"""

import ctypes
import dataclasses
import json
import math
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda.host_kernels import HostKernels, build
from vllm_exl3.cuda import prefill_int8, prefill_plan
from vllm_exl3.cuda.compiler import compile_instance, compiler_unavailable
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill_input import QUANTIZE
from vllm_exl3.cuda.prefill_plan import PrefillArgs
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.ops.int8 import WEIGHT_STEP, linear_int8, quantize_rows, weight_bytes
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.ops.trellis import decode
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.pack.tile import unpack_states

GPU = GpuLimits("sm_90a", 5, 232448, ((2, 2),))
"""Few multiprocessors, so that thread blocks take several tiles and share the last ones."""

H200 = typical_limits("sm_90a")

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/prefill-fast.json"


def _weights(shards: tuple[Shard, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    words = sum(shard.trellis_words for shard in shards)
    trellis = rng.integers(-(1 << 15), 1 << 15, words, dtype=np.int16)

    def scale(size: int) -> np.ndarray:
        return (rng.uniform(0.5, 1.5, size) * rng.choice([-1, 1], size)).astype(np.float16)

    scales = (scale(sum(shard.in_features for shard in shards)), scale(sum(shard.out_features for shard in shards)))
    return torch.from_numpy(trellis), torch.from_numpy(scales[0]), torch.from_numpy(scales[1])


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("half_bits", [2, 3, 5, 6, 8])
def test_the_mapping_of_bytes(half_bits: int) -> None:
    """A of m64nNk32 by the PTX manual's layout, filled in the lanes' own order of ring positions."""
    tiles = np.random.default_rng(half_bits).integers(0, 1 << 16, (4, 1, 8 * half_bits), dtype=np.uint16).view(np.int16)
    states = unpack_states(tiles[:, 0], half_bits).astype(np.int64)
    product = (states * 0x83DCD12D) & 0xFFFFFFFF
    sums = sum((product >> shift) & 255 for shift in (0, 8, 16, 24))
    weights = (sums + 3) // 4 - 128
    x = np.random.default_rng(1).integers(-127, 128, (3, 64))
    found = np.zeros((16, 3), dtype=np.int64)
    for p in range(2):
        a, b = np.zeros((16, 32), dtype=np.int64), np.zeros((32, 3), dtype=np.int64)
        for lane in range(32):
            g, q = lane >> 2, lane & 3
            for register in range(4):  # rows g and g + 8, then the same with 16 more of k
                first = 32 * g + 16 * p + 4 * register
                slot = 4 * q + 16 * (register >> 1)
                a[g + 8 * (register & 1), slot : slot + 4] = weights[q, first : first + 4]
        for slot in range(32):
            q, i = slot % 16 // 4, 2 * p + slot // 16
            b[slot] = x[:, 16 * q + (2 * i, 2 * i + 1, 2 * i + 8, 2 * i + 9)[slot % 4]]
        found += a @ b
    dense = weight_bytes(torch.from_numpy(tiles), half_bits).numpy().astype(np.int64)
    np.testing.assert_array_equal(found, (x @ dense).T)


def test_rounded_weights_are_near() -> None:
    """Every state once: the step is right, the error its twelfth root, and the middle of a step hardly off."""
    words = torch.randint(-(1 << 15), 1 << 15, (64, 64, 64), dtype=torch.int16)
    exact = decode(words, 8, Codebook.MUL1).double()
    error = weight_bytes(words, 8).double() * WEIGHT_STEP - exact
    assert error.abs().max() <= 0.5 * WEIGHT_STEP * 1.0 + 2e-3
    assert 0.0076 <= error.norm() / exact.norm() <= 0.0079
    assert abs(error.mean()) <= 0.06 * WEIGHT_STEP


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1e-3, 1.0, 1e3]), st.sampled_from([3, 5, 8]), st.integers(1, 8))
def test_the_stated_bound(seed: int, magnitude: float, half_bits: int, blocks: int) -> None:
    """Normal activations err by 1.2 %; a value of any row is rounded by half a step at most."""
    shard = (Shard(half_bits, 2, 128 * blocks, 128, 0, 128),)
    weights, layout = _weights(shard, seed), tuple(pack_shards(shard))
    x = torch.randn((32, 128 * blocks), generator=torch.Generator().manual_seed(seed)) * magnitude
    assert _relative(linear_int8(x, *weights, None, layout), linear_reference(x, *weights, None, layout)) <= 1.3e-2
    x[:, :128] *= 100
    rounded, step = quantize_rows(x)
    assert (rounded * step - x).abs().amax() <= 0.501 * step.max()


def test_odd_rows() -> None:
    """Zeros stay zeros, and what is no number does not come out as something plausible."""
    shard = (Shard(8, 2, 128, 128, 0, 128),)
    weights, layout = _weights(shard, 1), tuple(pack_shards(shard))
    x = torch.zeros((3, 128))
    x[1, 5], x[2, 7] = math.inf, math.nan
    found = linear_int8(x, *weights, None, layout)
    assert not found[0].any() and not found[1:].isfinite().any()


def test_only_what_suits_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    good, coarse = Shard(8, 2, 4096, 1024, 0, 1024), Shard(10, 2, 4096, 1024, 0, 1024)
    other, wide = Shard(8, 1, 4096, 1024, 0, 1024), Shard(8, 2, 32896, 1024, 0, 1024)
    least = prefill_int8.LEAST_ROWS
    assert not prefill_int8.serves((good,), 4096, H200) and not prefill_int8.instances((good,), H200)
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    assert prefill_int8.serves((good, good), least, H200) and not prefill_int8.serves((good,), least - 1, H200)
    assert {i.entry for i in prefill_int8.instances((good,), H200)} == {
        "exl3_prefill_finish",
        "exl3_prefill_int8",
        "exl3_prefill_quantize",
    }
    for shards, limits, reason in (
        ((good, coarse), H200, "more than 4 bits"),
        ((good, other), H200, "only mul1"),
        ((wide,), H200, "one input width of at most 32768"),
        ((good, wide), H200, "one input width"),
        ((good,), typical_limits("sm_80"), "no int8 kernel for sm_80"),
    ):
        assert reason in str(prefill_int8.refusal(shards, limits))
        assert not prefill_int8.serves(shards, 4096, limits) and not prefill_int8.instances(shards, limits)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not prefill_int8.serves((good,), 4096, H200)


def test_it_serves_where_it_was_measured_to_win() -> None:
    """Not where the default mode is as fast, since that errs less."""
    times = {
        (row["kernel"], row["in"], row["out"], row["bits"], row["m"]): row["us"]
        for row in json.loads(RESULTS.read_text())["rows"]
        if row["kernel"] != "cublas_bf16"
    }
    gains = defaultdict(list)
    for (kernel, *layer, rows), taken in times.items():
        if kernel == "native_fast":
            gains[rows].append(times["native", *layer, rows] / taken)
    for rows, found in gains.items():
        assert rows >= prefill_int8.LEAST_ROWS if min(found) > 1 else rows < prefill_int8.LEAST_ROWS
    assert min(gains) < prefill_int8.LEAST_ROWS <= max(gains)


def test_the_report_says_what_is_served() -> None:
    from vllm_exl3.cuda.precision import summary

    small, large = Shard(8, 2, 4096, 1024, 0, 1024), Shard(8, 2, 4096, 14336, 0, 14336)
    coarse = Shard(12, 2, 4096, 14336, 0, 14336)
    tiny = Shard(8, 2, 1024, 1024, 0, 1024)
    layers = [tuple(pack_shards(layer)) for layer in ((tiny,), (large, small), (coarse,))]
    too_coarse = "1 in default arithmetic: int8 is too coarse for more than 4 bits"
    assert summary(layers, H200) == [
        f"fast, int8 from {prefill_int8.LEAST_ROWS} tokens on: 2 of 3 linears; {too_coarse}",
        "fast, int8 for 9 to 128 tokens: 1 of 3 linears; "
        f"1 in default arithmetic: the layer is too small to gain; {too_coarse}",
        f"fast, int8 for 5 to 8 tokens: 2 of 3 linears; {too_coarse}",
    ]
    assert summary(layers, typical_limits("sm_89"))[0] == (
        f"fast, int8 from {prefill_int8.LEAST_ROWS} tokens on: 0 of 3 linears; "
        "3 in default arithmetic: there is no int8 kernel for sm_89"
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return build("prefill_int8", tmp_path_factory.mktemp("prefill_int8"))


def _aligned(size: int) -> np.ndarray:
    raw = np.full(size + 512, 0xFF, np.uint8)
    return raw[-raw.ctypes.data % 256 :][:size]


def _on_the_host(
    library: HostKernels,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor,
    shards: tuple[Shard, ...],
    ranges: int | None,
) -> torch.Tensor:
    """The kernels one after the other, whose plan `without_clusters` has to have changed; shards as `multiply` has."""
    trellis, suh, svh = weights
    plan = prefill_plan.plan_prefill.__wrapped__(shards, *x.shape, GPU, 192, ranges, int8=True)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    scratch, words = _aligned(plan.scratch), _aligned(2 * trellis.numel())
    words[:] = trellis.numpy().view(np.uint8)
    out = np.full((len(x), len(bias)), math.nan, np.float32)
    for name, offset in plan.scratch_parts.items():
        setattr(arguments, name, scratch.ctypes.data + offset)
    for shard, at in zip(arguments.shards, plan.offsets, strict=False):
        shard.trellis = words.ctypes.data + 2 * at.trellis
        shard.suh, shard.svh = suh.data_ptr() + 2 * at.suh, svh.data_ptr() + 2 * at.svh
    arguments.x, arguments.x_stride, arguments.x_type = x.data_ptr(), x.shape[1], 0
    arguments.out, arguments.out_stride, arguments.out_type = out.ctypes.data, len(bias), 2
    arguments.bias, arguments.bias_type = bias.data_ptr(), 2
    library.quantize(ctypes.byref(arguments), *plan.transform.grid, plan.transform.threads)
    library.multiply(ctypes.byref(arguments), plan.grid, plan.threads, plan.shared, shards[-1].half_bits)
    if plan.finish is not None:
        library.finish(ctypes.byref(arguments), *plan.finish)
    return torch.from_numpy(out)


@pytest.fixture
def without_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose blocks would have to run side by side."""
    original = prefill_plan.kernel
    monkeypatch.setattr(prefill_plan, "kernel", lambda *of: dataclasses.replace(original(*of), n_blocks=1))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize(("rows", "half_bits", "ranges"), [(250, 5, None), (3, 6, 5), (200, 6, 0)])
def test_the_kernels_on_the_host(
    library: HostKernels, without_clusters: None, rows: int, half_bits: int, ranges: int | None
) -> None:
    shards = (Shard(8, 2, 384, 256, 0, 256), Shard(half_bits, 2, 384, 128, 20, 100))
    weights, bias = _weights(shards, rows), torch.randn(356)
    x = torch.randn((rows, 312), generator=torch.Generator().manual_seed(rows)).half()  # up to 384 counts as zero
    found = _on_the_host(library, x, weights, bias, shards, ranges)
    expected = linear_int8(x.float(), *weights, bias, tuple(pack_shards(shards)))
    assert _relative(found, expected) <= 5e-4  # sums pass through fp16


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
def test_bits_depend_on_no_cut_and_no_other_row(library: HostKernels, without_clusters: None) -> None:
    """Whole tiles, tiles cut in two and more parts, a row by itself: products are exact, and all that follows alike.

    Rows of several magnitudes, one of them with an outlier, since what was rounded in parts differed in small ones.
    """
    shards = (Shard(8, 2, 640, 256, 0, 256), Shard(6, 2, 640, 128, 20, 100))
    weights, bias = _weights(shards, 1), torch.randn(356)
    x = torch.randn((200, 640)) * 10.0 ** torch.arange(-2, 3).repeat(40)[:, None]
    x[::7, 5] *= 100
    x = x.half()
    whole = _on_the_host(library, x, weights, bias, shards, 0)
    assert whole.isfinite().all()
    for ranges in (3, 4, 5, None):
        assert torch.equal(_on_the_host(library, x, weights, bias, shards, ranges), whole), ranges
    for row in (0, 7, 199):
        for ranges in (0, 4, None):
            alone = _on_the_host(library, x[row : row + 1], weights, bias, shards, ranges)
            assert torch.equal(alone[0], whole[row]), (row, ranges)


@pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))
def test_the_largest_instance_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    layer = tuple(Shard(h, 2, 4096, 1024, 0, 1024) for h in (8, 5, 6))
    for instance in (QUANTIZE, prefill_int8.instances(layer, H200)[-1]):
        cubin = compile_instance(instance, "sm_90a")
        assert cubin.spill_bytes == 0 and not cubin.serialised
