"""How one fused linear of few tokens is divided among thread blocks, by modelled time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["COLUMN_CHANNELS", "NarrowPartition", "choose_partition", "clustered"]

COLUMN_CHANNELS = 256
"""Output channels of an n tile for each tile column of a warp."""

_ITEM_US, _COLUMN_US = 0.12, 0.66
"""Microseconds of a k block of 128 × 256 weights on one multiprocessor of an H200, and of each tile column of it."""

_END_US, _COLUMN_END_US, _SECOND_END_US = 0.5, 0.5, 0.8
"""Microseconds of the epilogue of an n tile, of each tile column of it, and of a second one in a block."""

_EXCHANGE_US, _CLUSTER_US, _ADD_US, _ALONE_TOKENS = 0.9, 0.3, 0.004, 4
"""Microseconds of waiting for other blocks' partial sums, through memory or in a cluster; of adding up partial sums,
for each token and tile column; the tokens up to which one block does that for a whole n tile. From measurements on an
H200 (docs/notes/kernels-gpu.md)."""


@dataclass(frozen=True, slots=True)
class NarrowPartition:
    """How a launch's k blocks are divided among blocks. It decides the order of fp32 sums.

    Attributes:
        columns: tile columns a warp multiplies; an n tile is 256 channels times that.
        splits: split-K: blocks that share an n tile equally; 0: stream-K over the whole list.
        blocks: thread blocks a row tile.
    """

    columns: int
    splits: int
    blocks: int


def clustered(partition: NarrowPartition, limits: GpuLimits) -> bool:
    """True where an n tile's blocks form a cluster: as many clusters as there are n tiles must run at once."""
    return partition.splits > 1 and partition.blocks <= partition.splits * dict(limits.clusters).get(
        partition.splits, 0
    )


@functools.lru_cache(maxsize=4096)
def choose_partition(shards: tuple[Shard, ...], limits: GpuLimits, most_columns: int, tokens: int) -> NarrowPartition:
    """The partition of least modelled time.

    Args:
        shards: of the launch.
        limits: the GPU.
        most_columns: tile columns a warp may have.
        tokens: the most that the arithmetic serves in a tile.
    """
    found = []
    for columns in (1, 2)[:most_columns]:
        found += _stream_k(shards, limits, columns, tokens) + _split_k(shards, limits, columns, tokens)
    return min(found, key=lambda pair: pair[0])[1]


def _k_block_us(columns: int) -> float:
    return _ITEM_US + _COLUMN_US * columns


def _end_us(columns: int) -> float:
    return _END_US + _COLUMN_END_US * columns


def _add_us(columns: int, tokens: int, splits: float) -> float:
    """Microseconds of adding up the partial sums of an n tile: with more tokens its blocks share that."""
    return _ADD_US * columns * tokens * (splits if tokens <= _ALONE_TOKENS else 1)


def _n_tiles(shards: Sequence[Shard], columns: int) -> list[int]:
    return [-(-shard.out_features // (COLUMN_CHANNELS * columns)) for shard in shards]


def _stream_k(
    shards: Sequence[Shard], limits: GpuLimits, columns: int, tokens: int
) -> list[tuple[float, NarrowPartition]]:
    """Stream-K: an equal range of the whole list for every block, mostly one n tile's end and part of a second."""
    n_tiles = _n_tiles(shards, columns)
    k_blocks = sum(count * (shard.in_features // BLOCK) for count, shard in zip(n_tiles, shards, strict=True))
    blocks = min(limits.multiprocessors, k_blocks)
    ends = _end_us(columns) + _SECOND_END_US + _EXCHANGE_US + _add_us(columns, tokens, 1 + blocks / sum(n_tiles))
    return [(-(-k_blocks // blocks) * _k_block_us(columns) + ends, NarrowPartition(columns, 0, blocks))]


def _split_k(
    shards: Sequence[Shard], limits: GpuLimits, columns: int, tokens: int
) -> list[tuple[float, NarrowPartition]]:
    """Split-K: an equal range of one n tile for every block; the shards must be of one depth."""
    depths, n_tiles, found = {shard.in_features // BLOCK for shard in shards}, sum(_n_tiles(shards, columns)), []
    for depth in depths if len(depths) == 1 else ():
        for splits in range(1, depth + 1):
            if splits > 1 and n_tiles * splits > limits.multiprocessors:
                break
            partition = NarrowPartition(columns, splits, n_tiles * splits)
            exchange = (splits > 1) * _EXCHANGE_US + _add_us(columns, tokens, splits)
            waves = -(-partition.blocks // limits.multiprocessors)
            each = -(-depth // splits) * _k_block_us(columns) + _end_us(columns)
            found.append((waves * each + (_CLUSTER_US if clustered(partition, limits) else exchange), partition))
    return found
