"""The kernel that rotates inputs of prefill on tensor cores, on the host: rows of all kinds, clusters of all sizes."""

import ctypes
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cuda.host_kernels import HostKernels, build
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill_input import ROTATE, plan_rotate
from vllm_exl3.cuda.prefill_plan import PrefillArgs, plan_prefill
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

H200 = GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14)))
_RESIDENT = {8: 2, 16: 1}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return build("rotate", tmp_path_factory.mktemp("prefill_rotate"))


def _aligned(size: int) -> np.ndarray:
    raw = np.full(size + 512, 0xFF, np.uint8)
    return raw[-raw.ctypes.data % 256 :][:size]


def _hadamard(values: np.ndarray) -> np.ndarray:
    h = np.array([[1.0]])
    for _ in range(7):
        h = np.block([[h, h], [h, -h]])
    return (values.reshape(len(values), -1, BLOCK) @ h / np.sqrt(BLOCK)).reshape(values.shape)


def _rows(rows: int, width: int, dtype: torch.dtype, signs: np.ndarray) -> torch.Tensor:
    """Ordinary rows, and those whose scale is not guessed from their first block; ``signs`` grow most when rotated."""
    x = torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, width)))
    x[0] *= 1e4 if dtype == torch.bfloat16 else 100
    x[1, width - 8] = 30000
    x[2] *= 1e-6
    x[3] = 0
    x[4, :BLOCK] = 0
    x[5, :BLOCK] = 0
    x[5] *= 1e-5
    x[6] = torch.from_numpy(signs[:width])
    x[6, :BLOCK] *= 1e-3
    x[7, width - 1] = math.nan
    x[8, 5] = math.inf
    x[9, 7] = -60000
    x[10] *= 1e-7 if dtype == torch.float16 else 1e-30
    return x.to(dtype)


def _run(library: HostKernels, x: torch.Tensor, suh: np.ndarray, tokens: int, cluster_size: int) -> np.ndarray:
    """A of every shard, ``[shards, rows, in_features]``, its scale undone."""
    shards, in_features = suh.shape
    rows, width = x.shape
    layer = tuple(Shard(8, 2, in_features, BLOCK, 0, BLOCK) for _ in range(shards))
    plan = plan_prefill(layer, rows, width, H200, tokens)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    activations = _aligned(2 * shards * arguments.row_tiles * tokens * in_features).view(np.float16)
    held, scales = _aligned(suh.nbytes).view(np.float16), np.full((shards, rows), np.nan, np.float32)
    held[:] = suh.ravel()
    arguments.cluster_size = cluster_size
    arguments.x, arguments.x_stride, arguments.x_type = x.data_ptr(), width, int(x.dtype == torch.bfloat16)
    arguments.activations, arguments.scales = activations.ctypes.data, scales.ctypes.data
    for index in range(shards):
        arguments.shards[index].suh = held.ctypes.data + 2 * index * in_features
    library.rotate(ctypes.byref(arguments))
    # [shard][row tile][unit][matrix = pair of channels, whether 8 further][token][k-tile][half]
    stored = activations.reshape(shards, arguments.row_tiles, in_features // 64, 4, 2, tokens, 4, 2)
    found = stored.transpose(0, 1, 5, 2, 6, 4, 3, 7).reshape(shards, -1, in_features)
    assert np.isnan(found[:, rows:].astype(np.float32)).all(), "rows beyond the last were written"
    finite = np.isfinite(found[:, :rows])
    assert (np.abs(found[:, :rows][finite]) <= 2048).all()
    with np.errstate(invalid="ignore"):
        return found[:, :rows].astype(np.float64) * scales[:, :, None]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "in_features", "width", "tokens", "cluster_size"),
    [(21, 1280, 1208, 64, 1), (11, 768, 768, 256, 2), (13, 2048, 2048, 192, 4), (11, 2304, 2240, 64, 8)],
)
def test_rows_are_rotated(
    library: HostKernels, dtype: torch.dtype, rows: int, in_features: int, width: int, tokens: int, cluster_size: int
) -> None:
    rng = np.random.default_rng(in_features)
    suh = (rng.uniform(0.2, 2, (2, in_features)) * rng.choice([-1, 1], (2, in_features))).astype(np.float16)
    x = _rows(rows, width, dtype, np.sign(suh[0].astype(np.float64)))
    found = _run(library, x, suh, tokens, cluster_size)
    wide = np.zeros((rows, in_features))
    wide[:, :width] = x.double().numpy()
    for shard in range(2):
        expected = _hadamard(wide * suh[shard].astype(np.float64))
        for row in range(rows):
            if not np.isfinite(wide[row]).all():
                assert not np.isfinite(found[shard, row]).all()
                continue
            error, norm = np.linalg.norm(found[shard, row] - expected[row]), np.linalg.norm(expected[row])
            assert error <= 4e-4 * norm, (shard, row, error, norm)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize(
    ("everywhere", "least"),
    [(False, 0.0), *((everywhere, least) for everywhere in (False, True) for least in (6e-8, 1e-5, 2e-4))],
)
def test_channels_with_next_to_no_scale_may_hold_anything(library: HostKernels, everywhere: bool, least: float) -> None:
    """What 16 bits cannot hold once the row is scaled is multiplied by zero or next to it, here for whole lanes."""
    rng = np.random.default_rng(int(1e9 * least))
    suh = (rng.uniform(0.2, 2, (1, 256)) * rng.choice([-1, 1], (1, 256))).astype(np.float16)
    suh[:, 64 if not everywhere else 0 :] = least
    x = torch.from_numpy(rng.standard_normal((9, 256))).bfloat16()
    x[1, 64:128] = 1e8  # beside which fp16 has two or three digits of the others
    x[2, 200] = -1e6
    x[3, 100], x[3, 240] = 3e5, -1e6
    x[4, 128:] *= 1e4
    found = _run(library, x, suh, 64, 1)[0]
    expected = _hadamard(x.double().numpy() * suh.astype(np.float64))
    error, norm = np.linalg.norm(found - expected, axis=1), np.linalg.norm(expected, axis=1)
    bounds = np.where(np.arange(9) == 1, 0.02, 4e-4)
    assert (error <= bounds * norm).all(), error / norm


@given(
    st.integers(1, 20_000), st.integers(1, 224), st.integers(1, 8),
    st.sampled_from([H200, GpuLimits("sm_90a", 16, 232448)]),
)  # fmt: skip
def test_clusters_run_at_once(rows: int, in_blocks: int, shards: int, limits: GpuLimits) -> None:
    launch = plan_rotate(rows, BLOCK * in_blocks, limits, shards)
    warps, groups = launch.threads // 32, -(-rows // 8)
    assert launch.instance == ROTATE[warps] and launch.grid == (
        groups * launch.cluster,
        shards,
    )
    if launch.cluster > 1:
        most = dict(limits.clusters).get(launch.cluster, limits.multiprocessors // launch.cluster)
        assert groups * shards <= _RESIDENT[warps] * most
        assert launch.cluster * warps <= in_blocks  # every warp has a 128-block


@pytest.mark.parametrize(
    ("rows", "warps", "cluster_size"),
    [(64, 8, 8), (128, 8, 4), (256, 8, 2), (512, 16, 2), (1024, 16, 1), (2048, 8, 1), (4096, 8, 1)],
)
def test_what_was_measured_to_be_fastest(rows: int, warps: int, cluster_size: int) -> None:
    launch = plan_rotate(rows, 14336, H200)
    assert (launch.threads, launch.cluster) == (32 * warps, cluster_size)
