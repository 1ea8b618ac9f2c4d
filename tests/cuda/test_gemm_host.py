"""The GEMM for up to 128 tokens on the host: its byte sums, the kernel that rotates its input, and whole layers."""

import ctypes
import math
import shutil

import numpy as np
import pytest
import torch

from tests.cuda.host_kernels import HostKernels, build
from vllm_exl3.cuda.gemm_plan import GemmPartition, plan_gemm
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill_arguments import PrefillArgs
from vllm_exl3.cuda.prefill_input import Input
from vllm_exl3.cuda.prefill_plan import GemmPlan
from vllm_exl3.ops.fused_linear import add_rms_norm, silu_and_mul
from vllm_exl3.ops.int8 import linear_int8
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.codec import decode_states
from vllm_exl3.pack.stored import BLOCK, Codebook

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
LIMITS = GpuLimits("sm_90a", 132, 232448)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return build("gemm", tmp_path_factory.mktemp("gemm"))


def _aligned(size: int) -> np.ndarray:
    raw = np.full(size + 512, 0xFF, np.uint8)
    return raw[-raw.ctypes.data % 256 :][:size]


def _hadamard(size: int = BLOCK) -> np.ndarray:
    h = np.array([[1.0]])
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def _complemented(library: HostKernels) -> np.ndarray:
    """Of every channel of a 128-block."""
    return np.array([library.is_complemented(k) for k in range(BLOCK)], bool)


def _constants(library: HostKernels) -> tuple[float, float, float]:
    found = (ctypes.c_float * 3)()
    library.constants(found)
    return found[0], found[1], found[2]


def test_byte_sums_and_their_complements_are_the_weights(library: HostKernels) -> None:
    """Of every state, in both halves of a word, with and without complement."""
    scale, offset, complement_offset = _constants(library)
    words = np.zeros((2, 2, 65536), np.uint32)
    library.byte_sums_of_states(words.ctypes.data_as(ctypes.c_void_p))
    states = np.arange(65536, dtype=np.uint32)
    weights = decode_states(np.stack([states, states * 40503 & 65535]).astype(np.uint16), Codebook.MUL1)
    for first in (0, 1):
        for second in (0, 1):
            halves = words[first, second] & 65535, words[first, second] >> 16
            for half, complement, expected in zip(halves, (first, second), weights, strict=True):
                # The tensor core reads the integer as an fp16 number. What it stands for is exact, and is rounded once.
                found = half.astype(np.uint16).view(np.float16).astype(np.float64) * scale
                found = offset + complement_offset - found if complement else found + offset
                np.testing.assert_array_equal(found.astype(np.float16), expected)
                assert (half <= 1020).all()


def test_no_rotated_channel_is_near_the_complements(library: HostKernels) -> None:
    """A bent function: a constant rotated channel leaves a quarter of its offset, whichever channel it was."""
    signs = 1.0 - 2.0 * _complemented(library)
    assert set(np.abs(_hadamard(16) @ signs[:16])) == {4.0}
    assert np.abs(_hadamard() @ signs).max() == BLOCK / 4
    np.testing.assert_array_equal(signs, np.tile(signs[:16], 8))


class Layer:
    """Weights, inputs and memory of one launch on the host.

    Args:
        shards: the fused layer's.
        x: ``[M, width]``, any dtype.
        cut: how to divide the work.
        int8: multiply int8.
    """

    def __init__(
        self, shards: tuple[Shard, ...], x: torch.Tensor, partition: GemmPartition | None = None, *, int8: bool = False
    ) -> None:
        rng = np.random.default_rng(1)
        words = sum(shard.trellis_words for shard in shards)
        self.shards, self.x = shards, x
        self.trellis = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, words, dtype=np.int16))
        inputs, outputs = (sum(getattr(s, name) for s in shards) for name in ("in_features", "out_features"))
        self.suh, self.svh = (
            torch.from_numpy((rng.uniform(0.5, 1.5, size) * rng.choice([-1, 1], size)).astype(np.float16))
            for size in (inputs, outputs)
        )
        self.plan: GemmPlan = plan_gemm.__wrapped__(shards, x.shape[0], x.shape[1], LIMITS, partition, int8=int8)
        self.arguments = PrefillArgs.from_buffer_copy(self.plan.arguments)
        self.scratch, self._words = _aligned(self.plan.scratch + 256), _aligned(2 * words)  # 256: that nobody may touch
        self._words[:] = self.trellis.numpy().view(np.uint8)
        self._scales = _aligned(2 * (inputs + outputs)).view(np.float16)
        self._scales[:] = np.concatenate([self.suh.numpy(), self.svh.numpy()])
        for name, offset in self.plan.scratch_parts.items():
            setattr(self.arguments, name, self.scratch.ctypes.data + offset)
        for shard, at in zip(self.arguments.shards, self.plan.offsets, strict=False):
            shard.trellis = self._words.ctypes.data + 2 * at.trellis
            shard.suh = self._scales.ctypes.data + 2 * at.suh
            shard.svh = self._scales.ctypes.data + 2 * (inputs + at.svh)
        self.arguments.x, self.arguments.x_stride, self.arguments.x_type = x.data_ptr(), x.stride(0), _TYPES[x.dtype]

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Trellis, suh and svh."""
        return self.trellis, self.suh, self.svh

    def part(self, name: str, dtype: type, count: int) -> np.ndarray:
        """Some of the scratch."""
        begin = self.plan.scratch_parts[name]
        return self.scratch[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)


ONE = (Shard(8, 2, 768, 640, 0, 640),)
RATES = (Shard(8, 2, 768, 256, 0, 256), Shard(5, 2, 768, 384, 20, 330))
CODEBOOKS = (Shard(8, 2, 768, 256, 0, 256), Shard(6, 1, 768, 384, 0, 384), Shard(8, 2, 768, 128, 64, 60))
HALVES = (Shard(4, 0, 768, 384, 0, 384),)
SMALL = (Shard(8, 2, 384, 384, 0, 384),)
BYTES = (Shard(8, 2, 384, 256, 0, 256), Shard(5, 2, 384, 128, 20, 100))
KINDS = {ONE: 0, RATES: 1, CODEBOOKS: 2, HALVES: 3, SMALL: 0, BYTES: 4}
"""Of the kernels in gemm.cpp."""


@pytest.mark.parametrize(
    ("shards", "rows", "partition", "dtype"),
    [
        (ONE, 20, None, torch.float16),
        (ONE, 8, GemmPartition(6, True), torch.float32),  # two parts of an n tile
        # six parts of an n tile, more rows of them than the ring holds
        pytest.param(ONE, 60, GemmPartition(18, False), torch.float32, marks=pytest.mark.slow),
        # a block has the end of one n tile, and the beginning of another
        pytest.param(RATES, 30, GemmPartition(4, False), torch.float16, marks=pytest.mark.slow),
        (RATES, 24, GemmPartition(18, True), torch.bfloat16),  # six equal parts
        pytest.param(CODEBOOKS, 30, GemmPartition(7, False), torch.float32, marks=pytest.mark.slow),
        (CODEBOOKS, 31, GemmPartition(12, True), torch.float16),
        (HALVES, 19, GemmPartition(1, False), torch.float32),  # one block has all
        (SMALL, 121, GemmPartition(1, False), torch.float32),  # so many tokens that they are ended in two halves
        (SMALL, 123, GemmPartition(4, False), torch.float16),
        pytest.param(SMALL, 113, GemmPartition(6, True), torch.float32, marks=pytest.mark.slow),
        (BYTES, 60, None, torch.float32),
        (BYTES, 24, GemmPartition(4, False), torch.float32),
        pytest.param(BYTES, 117, GemmPartition(6, True), torch.float32, marks=pytest.mark.slow),
    ],
)
def test_layers(
    library: HostKernels, shards: tuple[Shard, ...], rows: int, partition: GemmPartition | None, dtype: torch.dtype
) -> None:
    int8, width = shards is BYTES, shards[0].in_features - 52
    rng = np.random.default_rng(rows)
    sizes = 2.0 ** rng.integers(-3, 4, (rows, 1))  # no two rows have the same scale
    x = torch.from_numpy(rng.standard_normal((rows, width + 8)) * sizes).to(dtype)[:, :width]
    x[rows // 2] = 0
    columns = sum(shard.crop_size for shard in shards)
    bias = torch.from_numpy(rng.standard_normal(columns)).to(dtype)
    weights = Layer(shards, x, partition, int8=int8).weights
    reference = linear_int8 if int8 else linear_reference
    expected = reference(x.float(), *weights, bias.float(), tuple(pack_shards(shards)))
    pitch = columns + 8 - columns % 8
    outs = []
    for backwards in (0, 1):
        layer = Layer(shards, x, partition, int8=int8)
        arguments = layer.arguments
        out = torch.full((rows + 1, pitch), math.nan, dtype=dtype)
        arguments.out, arguments.out_stride, arguments.out_type = out.data_ptr(), pitch, _TYPES[dtype]
        arguments.bias, arguments.bias_type = bias.data_ptr(), _TYPES[dtype]
        library.rotate(ctypes.byref(arguments), 1, int8, Input.PLAIN)
        plan = layer.plan
        library.multiply(ctypes.byref(arguments), plan.grid, plan.threads, plan.shared, KINDS[shards], backwards)
        assert (layer.scratch[plan.scratch :] == 0xFF).all()
        assert out[:rows, columns:].isnan().all() and out[rows].isnan().all()
        outs.append(out[:rows, :columns])
    error = (outs[0].double() - expected.double()).norm() / expected.double().norm()
    assert error <= {torch.float32: 5e-4, torch.float16: 6e-4, torch.bfloat16: 3e-3}[dtype], error
    assert torch.equal(outs[0], outs[1]), "bits depend on which block ends an n tile"


def _rows(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary rows, and those whose scale is not that of most of their blocks."""
    x = torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, width)))
    x[0] *= 1e-6
    x[1, width - 1] = 30000
    x[2] = 0
    x[3, :BLOCK] = 0
    x[4, 5] = math.nan
    x[5, width - 2] = math.inf
    x[6] *= 1e4 if dtype == torch.float16 else 1e30
    return x.to(dtype)


@pytest.mark.parametrize("codebook", [Codebook.MUL1, Codebook.MCG])
@pytest.mark.parametrize(
    ("in_features", "width", "dtype", "cluster_size", "transforms"),
    [
        (896, 896, torch.float16, 1, 1),
        (1280, 1276, torch.bfloat16, 2, 1),
        (2304, 2210, torch.float32, 4, 1),
        (2304, 2303, torch.float16, 1, 4),
        (3968, 3968, torch.bfloat16, 2, 4),
    ],
)
def test_rows_are_rotated(
    library: HostKernels,
    codebook: Codebook,
    in_features: int,
    width: int,
    dtype: torch.dtype,
    cluster_size: int,
    transforms: int,
) -> None:
    rows, shards = 11, (Shard(8, codebook, in_features, 384, 0, 384), Shard(8, codebook, in_features, 128, 0, 128))
    x = _rows(rows, width, dtype)
    layer = Layer(shards, x)
    blocks, tile = in_features // BLOCK, layer.arguments.tile_rows
    layer.arguments.cluster_size = cluster_size
    library.rotate(ctypes.byref(layer.arguments), transforms, 0, Input.PLAIN)
    assert (layer.part("arrivals", np.uint32, 3) == 0).all()
    # [shard][k block][matrix = pair of channels, whether 8 further][token][k-tile][half]
    stored = layer.part("activations", np.float16, 2 * in_features * tile).reshape(2, 2 * blocks, 4, 2, tile, 4, 2)
    stored = stored.transpose(0, 4, 1, 5, 3, 2, 6).reshape(2, tile, in_features).astype(np.float64)
    assert np.isnan(stored[:, rows:]).all(), "rows beyond the last were written"
    stored, flips = stored[:, :rows], np.tile(_complemented(library), blocks) & (codebook is Codebook.MUL1)
    values = np.where(flips, -stored, stored)
    undo = layer.part("scales", np.float32, 2 * rows).reshape(2, rows, 1).astype(np.float64)
    wide = np.zeros((rows, in_features))
    wide[:, :width] = x.double().numpy()
    suh = layer.suh.numpy().astype(np.float64).reshape(2, 1, in_features)
    with np.errstate(invalid="ignore"):
        expected = ((wide * suh).reshape(2, rows, blocks, BLOCK) @ _hadamard() / math.sqrt(BLOCK)).reshape(2, rows, -1)
        found = values * undo
    finite = np.isfinite(wide).all(axis=1)
    assert not np.isfinite(found[:, ~finite]).all(axis=-1).any()
    assert (np.abs(values[:, finite]) <= 2048).all()
    found, expected = found[:, finite], expected[:, finite]
    error, norm = (np.linalg.norm(each, axis=-1) for each in (found - expected, expected))
    assert (error <= 4e-4 * norm).all(), error / norm
    if codebook is Codebook.MUL1:
        _, offset, complement_offset = _constants(library)
        offsets = (
            layer.part("offsets", np.float32, 2 * rows * cluster_size)
            .reshape(2, rows, cluster_size)[:, finite]
            .sum(axis=-1)
        )
        each = values[:, finite] * (offset + np.where(flips, complement_offset, 0.0))
        bound = 1e-6 * np.abs(each).sum(axis=-1).max()
        np.testing.assert_allclose(offsets, each.sum(axis=-1), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("source", "residual", "in_features", "cluster_size", "dtype"),
    [
        (Input.RMS_NORM, True, 896, 1, torch.float16),
        (Input.RMS_NORM, True, 1280, 2, torch.bfloat16),
        (Input.RMS_NORM, False, 2304, 4, torch.bfloat16),
        (Input.SILU_AND_MUL, False, 896, 1, torch.bfloat16),
        (Input.SILU_AND_MUL, False, 2304, 4, torch.float16),
    ],
)
def test_norms_and_activations_are_rotated(
    library: HostKernels, source: Input, residual: bool, in_features: int, cluster_size: int, dtype: torch.dtype
) -> None:
    """With the GEMM behind them, against the norm or activation and a linear."""
    rows, width = 18, in_features - 4
    shards = (Shard(8, 2, in_features, 256, 0, 256), Shard(8, 2, in_features, 128, 64, 60))
    generator = torch.Generator().manual_seed(cluster_size)
    columns = 2 * width if source == Input.SILU_AND_MUL else width
    x, added = (torch.randn(rows, columns + 4, generator=generator).to(dtype)[:, :columns] for _ in range(2))
    x[1], added[1] = 0, 0
    x[2] *= 1e-3
    x[3, 5] = 3e4
    x[4, 7] = math.inf
    norm_weight = (torch.rand(width, generator=generator) + 0.5).to(dtype)
    added, epsilon = added.contiguous(), 1e-5
    layer = Layer(shards, x[:, :width])
    arguments = layer.arguments
    assert arguments.cluster_size == cluster_size
    total = torch.full((rows + 1, width), 7.0, dtype=dtype)
    if source == Input.RMS_NORM:
        arguments.norm_weight, arguments.epsilon = norm_weight.data_ptr(), epsilon
        if residual:
            arguments.residual, arguments.residual_out = added.data_ptr(), total.data_ptr()
        # Nothing is rounded before the linear, so the reference has inputs of float32 as well.
        terms = (x.float(), added.float() if residual else None, norm_weight.float())
        normed, sums = add_rms_norm(*terms, epsilon)
    else:
        normed = silu_and_mul(x.float())
    out = torch.full((rows, sum(shard.crop_size for shard in shards)), math.nan)
    arguments.out, arguments.out_stride, arguments.out_type = out.data_ptr(), out.stride(0), _TYPES[out.dtype]
    library.rotate(ctypes.byref(arguments), 1, 0, source)
    library.multiply(ctypes.byref(arguments), layer.plan.grid, layer.plan.threads, layer.plan.shared, 0, 0)
    expected = linear_reference(normed, *layer.weights, None, tuple(pack_shards(shards)))
    finite = expected.isfinite().all(dim=1)
    assert finite.tolist() == [row != 4 for row in range(rows)]
    assert not out[4].isfinite().any()
    error = (out[finite] - expected[finite]).double().norm(dim=1)
    assert (error <= 5e-4 * expected[finite].double().norm(dim=1)).all(), error
    if residual:
        torch.testing.assert_close(total[:rows], sums.to(dtype), rtol=0, atol=0)
        assert (total[rows] == 7).all()
