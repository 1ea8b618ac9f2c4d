"""How the rows of a prefill launch are divided among the blocks of the kernel that rotates them, or rounds them too."""

import enum
import functools
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import BLOCK_K, GpuLimits, round_up
from vllm_exl3.pack.stored import BLOCK

__all__ = [
    "MOST_FEW_IN",
    "MOST_INT8_IN",
    "QUANTIZE",
    "ROTATE",
    "ROTATE_FEW",
    "ROTATE_FUSED",
    "TRANSFORM",
    "Input",
    "InputLaunch",
    "input_instances",
    "plan_few_rows",
    "plan_quantize",
    "plan_rotate",
    "plan_transform",
]

TRANSFORM = Instance("prefill/transform.cu", "exl3_prefill_transform")
"""The kernel that rotates inputs of any dtype and alignment, for every tile."""

ROTATE = {
    warps: Instance(
        "prefill/rotate.cu", "exl3_prefill_rotate", (("ROTATE_WARPS", str(warps)), ("ROTATE_BLOCKS", str(16 // warps)))
    )
    for warps in (8, 16)
}
"""The kernel that rotates 16-bit inputs on Hopper's tensor cores, for every tile, by warps of a block."""


class Input(enum.IntEnum):
    """What gemm/rotate.cu rotates, as its ``Input`` has it."""

    PLAIN = 0
    RMS_NORM = 1
    SILU_AND_MUL = 2


def _rotate_few(transforms: int, source: Input, *, int8: bool) -> Instance:
    values = {"INSTANCE_TRANSFORMS": transforms, "INSTANCE_BYTES": int(int8), "INSTANCE_INPUT": int(source)}
    return Instance("gemm/rotate.cu", "exl3_gemm_rotate", tuple((name, str(value)) for name, value in values.items()))


ROTATE_FEW = {
    (transforms, int8): _rotate_few(transforms, Input.PLAIN, int8=int8)
    for transforms in (1, 2, 4)
    for int8 in (False, True)
}
"""The kernel that rotates inputs of any dtype for the GEMM, by 128-blocks of a warp and whether it rounds to int8."""

ROTATE_FUSED = {
    (transforms, int8, source): _rotate_few(transforms, source, int8=int8)
    for transforms, int8 in ROTATE_FEW
    for source in (Input.RMS_NORM, Input.SILU_AND_MUL)
}
"""The same after a norm or an activation, of 16-bit inputs."""

QUANTIZE = Instance("prefill/quantize.cu", "exl3_prefill_quantize")
"""The kernel that rotates inputs and rounds them to int8, for every tile."""

_TRANSFORM, _ROTATE, _QUANTIZE = map(constants, ("prefill/transform.cu", "prefill/rotate.cu", "prefill/quantize.cu"))
_MOST_ROWS, _MOST_THREADS, _PART = (_TRANSFORM[name] for name in ("MOST_ROWS", "MOST_THREADS", "PART"))
_ROTATED_ROWS, _QUEUED = _ROTATE["ROWS"], _ROTATE["QUEUED"]
_LARGEST_BYTES = _ROTATE["LARGEST_BYTES"] + _ROTATE["ARRIVED_BYTES"]
"""Shared memory of prefill/rotate.cu before its queues."""
_MOST_CLUSTER = 8
_BLOCK_K_PITCH, _WARP = 2 * BLOCK_K + 16, 32
_HELD_BYTES, _RESERVED = 75000, 2048
"""Shared memory of a block for rows, so little that some blocks load while others rotate; and of a block besides."""

_MOST_INT8_THREADS, _MOST_INT8_ROWS = _QUANTIZE["MOST_THREADS"], _QUANTIZE["MOST_ROWS"]
_INT8_THREADS = 256
"""Threads of such a block where rows are short enough to choose: several blocks share a multiprocessor."""
MOST_INT8_IN = _MOST_INT8_THREADS * BLOCK_K
"""Input channels up to which a block of prefill/quantize.cu has room for a row."""


@dataclass(frozen=True, slots=True)
class InputLaunch:
    """The launch of the kernel that rotates inputs.

    Attributes:
        instance: the kernel, such as `TRANSFORM`.
        block_rows: rows of a block, a power of two.
        grid: thread blocks in x and y.
        threads: threads a block.
        shared: dynamic shared memory in bytes; 0 where rows are too long for `TRANSFORM` to hold, which fetches them
            twice then.
        cluster: blocks of a thread block cluster.
    """

    instance: Instance
    block_rows: int
    grid: tuple[int, int]
    threads: int
    shared: int
    cluster: int = 1


def _held_bytes(block_rows: int, in_features: int) -> int:
    """Bytes of shared memory that rows take, padded as in prefill/transform.cu."""
    pitch = in_features // BLOCK_K * _BLOCK_K_PITCH // 128 * 128 + 128 + (64 if block_rows == 2 else 32)
    return block_rows * pitch


@functools.lru_cache(maxsize=4096)
def plan_transform(rows: int, in_features: int, limits: GpuLimits) -> InputLaunch:
    """Divide ``rows`` rows of ``in_features`` channels among the blocks of `TRANSFORM`.

    More rows a block make longer runs of stores, 16 bytes a row; fewer make enough blocks for every multiprocessor.
    """
    room, block_rows = limits.shared_memory - _RESERVED, _MOST_ROWS
    while block_rows > 2 and (
        _held_bytes(block_rows, in_features) > _HELD_BYTES or rows < 2 * block_rows * limits.multiprocessors
    ):
        block_rows //= 2
    if rows < limits.multiprocessors or 1.5 * _held_bytes(block_rows, in_features) > room:
        block_rows = 1
    parts = block_rows * in_features // _PART
    threads = round_up(-(-parts // -(-parts // _MOST_THREADS)), max(_WARP, BLOCK // _PART * block_rows))
    held = _held_bytes(block_rows, in_features) + in_features // BLOCK_K * _BLOCK_K_PITCH  # suh lies behind the rows
    return InputLaunch(TRANSFORM, block_rows, (-(-rows // block_rows), 1), threads, held if held <= room else 0)


def _cluster_size(groups: int, in_blocks: int, warps: int, limits: GpuLimits) -> int:
    """How many blocks share each group of rows: as many as run at once, while every warp has a 128-block."""
    fitting, cluster_size = dict(limits.clusters), 1
    while cluster_size < _MOST_CLUSTER and 2 * cluster_size * warps <= max(warps, in_blocks):
        most = fitting.get(2 * cluster_size, limits.multiprocessors // (2 * cluster_size))
        # Two blocks of 8 warps run on a multiprocessor, but clusters of 4 and 8 were slower where they must do so.
        if groups > most * (16 // warps if cluster_size == 1 else 1):
            break
        cluster_size *= 2
    return cluster_size


@functools.lru_cache(maxsize=4096)
def plan_rotate(rows: int, in_features: int, limits: GpuLimits, shards: int = 1) -> InputLaunch:
    """Divide ``rows`` rows of ``in_features`` channels among the blocks of `ROTATE`, which have a shard each.

    Blocks of 8 warps, but where two of them share rows and come to two thirds of the multiprocessors or more: 16 warps
    then need no cluster for it, or keep twice as many warps busy. Measured on an H200 at 64 to 4096 rows of 4096 to
    14336 channels; each was faster where it is chosen, or both were equal.
    """
    groups, in_blocks, warps = -(-rows // _ROTATED_ROWS), in_features // BLOCK, 8
    cluster_size = _cluster_size(groups * shards, in_blocks, warps, limits)
    if cluster_size == 2 and 3 * groups * shards >= limits.multiprocessors:
        warps, cluster_size = 16, _cluster_size(groups * shards, in_blocks, 16, limits)
    shared = _LARGEST_BYTES + 2 * BLOCK * _ROTATED_ROWS * (1 + _QUEUED * warps)
    return InputLaunch(
        ROTATE[warps], _ROTATED_ROWS, (groups * cluster_size, shards), _WARP * warps, shared, cluster_size
    )


_FEW_WARPS, _FEW_CLUSTERS, _FEW_TRANSFORMS = 8, (1, 2, 4, 8), (1, 2, 4)
MOST_FEW_IN = _FEW_WARPS * _FEW_CLUSTERS[-1] * _FEW_TRANSFORMS[-1] * BLOCK
"""Input channels up to which a cluster of gemm/rotate.cu holds a row."""


@functools.lru_cache(maxsize=4096)
def plan_few_rows(
    rows: int, in_features: int, shards: int = 1, *, int8: bool = False, source: Input = Input.PLAIN
) -> InputLaunch | None:
    """Divide few rows among the clusters of gemm/rotate.cu, one a row and shard; None above `MOST_FEW_IN` channels.

    A warp has one 128-block where a cluster may have so many blocks: what counts is how long the last block takes
    (docs/notes/kernels-gpu.md). The number of rows must not enter, since a cluster's blocks decide the order of a sum.
    """
    if in_features > MOST_FEW_IN:
        return None
    needed = {cluster_size: -(-in_features // BLOCK // (_FEW_WARPS * cluster_size)) for cluster_size in _FEW_CLUSTERS}
    cluster_size = next((few for few in _FEW_CLUSTERS if needed[few] <= 1), _FEW_CLUSTERS[-1])
    transforms = next(count for count in _FEW_TRANSFORMS if count >= needed[cluster_size])
    instance = ROTATE_FEW[transforms, int8] if source == Input.PLAIN else ROTATE_FUSED[transforms, int8, source]
    return InputLaunch(instance, 1, (rows * cluster_size, shards), 32 * _FEW_WARPS, 0, cluster_size)


def input_instances(limits: GpuLimits) -> list[Instance]:
    """The kernels that rotate inputs on a GPU, which are not rounded to int8."""
    return [TRANSFORM, *(ROTATE.values() if limits.warpgroups else ())]


@functools.lru_cache(maxsize=4096)
def plan_quantize(rows: int, in_features: int, shards: int) -> InputLaunch:
    """Divide ``rows`` rows of ``in_features`` channels, at most `MOST_INT8_IN`, among the blocks of `QUANTIZE`.

    More rows a block make longer runs of stores, 16 bytes a row.
    """
    block_rows = _MOST_INT8_ROWS
    while block_rows > 1 and block_rows * in_features // BLOCK_K > _INT8_THREADS:
        block_rows //= 2
    threads = round_up(block_rows * in_features // BLOCK_K, _WARP)
    held = _held_bytes(block_rows, in_features)
    return InputLaunch(QUANTIZE, block_rows, (-(-rows // block_rows), shards), threads, held)
