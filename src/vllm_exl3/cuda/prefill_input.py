"""How the rows of a prefill launch are divided among the blocks of the kernel that rotates them."""

import functools
from dataclasses import dataclass

from vllm_exl3.cuda.geometry import UNIT_IN, GpuLimits, round_up
from vllm_exl3.pack.stored import BLOCK

__all__ = ["InputCut", "cut_rows", "held_bytes"]

_MOST_ROWS, _MOST_THREADS, _PART = 16, 512, 32  # of prefill_transform.cu
_UNIT_PITCH, _WARP = 2 * UNIT_IN + 16, 32
_HELD_BYTES, _RESERVED = 75000, 2048
"""Shared memory of a block for rows, so little that some blocks load while others rotate; and of a block besides."""


@dataclass(frozen=True, slots=True)
class InputCut:
    """The launch of ``exl3_prefill_transform``.

    Attributes:
        block_rows: rows of a block, a power of two.
        blocks: thread blocks.
        threads: threads a block.
        shared: dynamic shared memory in bytes; 0 where rows are too long to be held, and fetched twice.
    """

    block_rows: int
    blocks: int
    threads: int
    shared: int


def held_bytes(block_rows: int, in_features: int) -> int:
    """Bytes of shared memory that rows take, padded as in prefill_transform.cu."""
    pitch = in_features // UNIT_IN * _UNIT_PITCH // 128 * 128 + 128 + (64 if block_rows == 2 else 32)
    return block_rows * pitch


@functools.lru_cache(maxsize=4096)
def cut_rows(rows: int, in_features: int, limits: GpuLimits) -> InputCut:
    """Divide ``rows`` rows of ``in_features`` channels.

    More rows a block make longer runs of stores, 16 bytes a row; fewer make enough blocks for every multiprocessor.
    """
    room, block_rows = limits.shared_memory - _RESERVED, _MOST_ROWS
    while block_rows > 2 and (
        held_bytes(block_rows, in_features) > _HELD_BYTES or rows < 2 * block_rows * limits.multiprocessors
    ):
        block_rows //= 2
    if rows < limits.multiprocessors or 1.5 * held_bytes(block_rows, in_features) > room:
        block_rows = 1
    parts = block_rows * in_features // _PART
    threads = round_up(-(-parts // -(-parts // _MOST_THREADS)), max(_WARP, BLOCK // _PART * block_rows))
    held = held_bytes(block_rows, in_features) + in_features // UNIT_IN * _UNIT_PITCH  # suh lies behind the rows
    return InputCut(block_rows, -(-rows // block_rows), threads, held if held <= room else 0)
