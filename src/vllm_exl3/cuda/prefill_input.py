"""How the rows of a prefill launch are divided among the blocks of the kernel that rotates them, or rounds them too."""

import functools
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import UNIT_IN, GpuLimits, round_up
from vllm_exl3.pack.stored import BLOCK

__all__ = [
    "FEW",
    "MOST_FEW_IN",
    "MOST_INT8_IN",
    "QUANTIZE",
    "ROTATE",
    "TRANSFORM",
    "InputCut",
    "cut_few_rows",
    "cut_int8_rows",
    "cut_rotated_rows",
    "cut_rows",
    "input_instances",
]

TRANSFORM = Instance("prefill_transform.cu", "exl3_prefill_transform")
"""The kernel that rotates inputs of any dtype and alignment, for every tile."""

ROTATE = {
    warps: Instance(
        "prefill_rotate.cu", "exl3_prefill_rotate", (("ROTATE_WARPS", str(warps)), ("ROTATE_BLOCKS", str(16 // warps)))
    )
    for warps in (8, 16)
}
"""The kernel that rotates 16-bit inputs on Hopper's tensor cores, for every tile, by warps of a block."""

FEW = {
    (transforms, int8): Instance(
        "gemm_rotate.cu",
        "exl3_gemm_rotate",
        (("INSTANCE_TRANSFORMS", str(transforms)), ("INSTANCE_BYTES", str(int(int8)))),
    )
    for transforms in (1, 2, 4)
    for int8 in (False, True)
}
"""The kernel that rotates inputs of any dtype for gemm.cu, by 128-blocks of a warp and whether it rounds to int8."""

QUANTIZE = Instance("prefill_quantize.cu", "exl3_prefill_quantize")
"""The kernel that rotates inputs and rounds them to int8, for every tile."""

_MOST_ROWS, _MOST_THREADS, _PART = 16, 512, 32  # of prefill_transform.cu
_ROTATED_ROWS, _MOST_SHARING, _QUEUED, _LARGEST_BYTES = 8, 8, 2, 128  # of prefill_rotate.cu
_UNIT_PITCH, _WARP = 2 * UNIT_IN + 16, 32
_HELD_BYTES, _RESERVED = 75000, 2048
"""Shared memory of a block for rows, so little that some blocks load while others rotate; and of a block besides."""

_MOST_INT8_THREADS, _MOST_INT8_ROWS = 512, 4  # of a block of prefill_quantize.cu; a thread has a unit of a row
_INT8_THREADS = 256
"""Threads of such a block where rows are short enough to choose: several blocks share a multiprocessor."""
MOST_INT8_IN = _MOST_INT8_THREADS * UNIT_IN
"""Input channels up to which a block of prefill_quantize.cu has room for a row."""


@dataclass(frozen=True, slots=True)
class InputCut:
    """The launch of the kernel that rotates inputs.

    Attributes:
        instance: the kernel, `TRANSFORM`, one of `ROTATE` or `QUANTIZE`.
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
    """Bytes of shared memory that rows take, padded as in prefill_transform.cu."""
    pitch = in_features // UNIT_IN * _UNIT_PITCH // 128 * 128 + 128 + (64 if block_rows == 2 else 32)
    return block_rows * pitch


@functools.lru_cache(maxsize=4096)
def cut_rows(rows: int, in_features: int, limits: GpuLimits) -> InputCut:
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
    held = _held_bytes(block_rows, in_features) + in_features // UNIT_IN * _UNIT_PITCH  # suh lies behind the rows
    return InputCut(TRANSFORM, block_rows, (-(-rows // block_rows), 1), threads, held if held <= room else 0)


def _sharing(groups: int, in_blocks: int, warps: int, limits: GpuLimits) -> int:
    """How many blocks share each group of rows: as many as run at once, while every warp has a 128-block."""
    fitting, sharing = dict(limits.clusters), 1
    while sharing < _MOST_SHARING and 2 * sharing * warps <= max(warps, in_blocks):
        most = fitting.get(2 * sharing, limits.multiprocessors // (2 * sharing))
        # Two blocks of 8 warps run on a multiprocessor, but clusters of 4 and 8 were slower where they must do so.
        if groups > most * (16 // warps if sharing == 1 else 1):
            break
        sharing *= 2
    return sharing


@functools.lru_cache(maxsize=4096)
def cut_rotated_rows(rows: int, in_features: int, limits: GpuLimits, shards: int = 1) -> InputCut:
    """Divide ``rows`` rows of ``in_features`` channels among the blocks of `ROTATE`, which have a shard each.

    Blocks of 8 warps, but where two of them share rows and come to two thirds of the multiprocessors or more: 16 warps
    then need no cluster for it, or keep twice as many warps busy. Measured on an H200 at 64 to 4096 rows of 4096 to
    14336 channels; each was faster where it is chosen, or both were equal.
    """
    groups, in_blocks, warps = -(-rows // _ROTATED_ROWS), in_features // BLOCK, 8
    sharing = _sharing(groups * shards, in_blocks, warps, limits)
    if sharing == 2 and 3 * groups * shards >= limits.multiprocessors:
        warps, sharing = 16, _sharing(groups * shards, in_blocks, 16, limits)
    shared = _LARGEST_BYTES + 2 * BLOCK * _ROTATED_ROWS * (1 + _QUEUED * warps)
    return InputCut(ROTATE[warps], _ROTATED_ROWS, (groups * sharing, shards), _WARP * warps, shared, sharing)


_FEW_WARPS, _FEW_SHARING, _FEW_TRANSFORMS = 8, (1, 2, 4, 8), (1, 2, 4)
MOST_FEW_IN = _FEW_WARPS * _FEW_SHARING[-1] * _FEW_TRANSFORMS[-1] * BLOCK
"""Input channels up to which a cluster of gemm_rotate.cu holds a row."""


@functools.lru_cache(maxsize=4096)
def cut_few_rows(rows: int, in_features: int, shards: int = 1, *, int8: bool = False) -> InputCut | None:
    """Divide few rows among the clusters of `FEW`, one a row and shard; None above `MOST_FEW_IN` channels.

    A warp has one 128-block where a cluster may have so many blocks: what counts is how long the last block takes
    (docs/kernels-gpu.md). The number of rows must not enter, since a cluster's blocks decide the order of a sum.
    """
    if in_features > MOST_FEW_IN:
        return None
    needed = {sharing: -(-in_features // BLOCK // (_FEW_WARPS * sharing)) for sharing in _FEW_SHARING}
    sharing = next((few for few in _FEW_SHARING if needed[few] <= 1), _FEW_SHARING[-1])
    transforms = next(count for count in _FEW_TRANSFORMS if count >= needed[sharing])
    return InputCut(FEW[transforms, int8], 1, (rows * sharing, shards), 32 * _FEW_WARPS, 0, sharing)


def input_instances(limits: GpuLimits) -> list[Instance]:
    """The kernels that rotate inputs on a GPU, which are not rounded to int8."""
    return [TRANSFORM, *(ROTATE.values() if limits.warpgroups else ())]


@functools.lru_cache(maxsize=4096)
def cut_int8_rows(rows: int, in_features: int, shards: int) -> InputCut:
    """Divide ``rows`` rows of ``in_features`` channels, at most `MOST_INT8_IN`, among the blocks of `QUANTIZE`.

    More rows a block make longer runs of stores, 16 bytes a row.
    """
    block_rows = _MOST_INT8_ROWS
    while block_rows > 1 and block_rows * in_features // UNIT_IN > _INT8_THREADS:
        block_rows //= 2
    threads = round_up(block_rows * in_features // UNIT_IN, _WARP)
    held = _held_bytes(block_rows, in_features)
    return InputCut(QUANTIZE, block_rows, (-(-rows // block_rows), shards), threads, held)
