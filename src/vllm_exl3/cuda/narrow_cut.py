"""How one fused linear of few tokens is divided among thread blocks, by modelled time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["COLUMN_CHANNELS", "Cut", "choose_cut", "clustered"]

COLUMN_CHANNELS = 256
"""Output channels of a strip for each tile column of a warp."""

_ITEM_US, _COLUMN_US = 0.12, 0.66
"""Microseconds of an item of 128 × 256 weights on one multiprocessor of an H200, and of each tile column of it."""

_END_US, _COLUMN_END_US, _SECOND_END_US = 0.5, 0.5, 0.8
"""Of ending a piece of a strip, and each tile column of it; of a second end in a block."""

_EXCHANGE_US, _CLUSTER_US, _ADD_US, _ALONE_TOKENS = 0.9, 0.3, 0.004, 4
"""Of waiting for other blocks' pieces, through memory or in a cluster; of adding up a piece, for each token and tile
column; the tokens up to which one block does that for a whole strip. From measurements on an H200
(docs/kernels-gpu.md)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a launch's items are divided among blocks. It decides the order of fp32 sums.

    Attributes:
        columns: tile columns a warp multiplies; a strip is 256 channels times that.
        parts: blocks that share a strip equally, or 0 where the whole list is cut.
        blocks: thread blocks a row tile.
    """

    columns: int
    parts: int
    blocks: int


def clustered(cut: Cut, limits: GpuLimits) -> bool:
    """Whether a strip's blocks form a cluster: as many clusters as there are strips must run at once."""
    return cut.parts > 1 and cut.blocks <= cut.parts * dict(limits.clusters).get(cut.parts, 0)


@functools.lru_cache(maxsize=4096)
def choose_cut(shards: tuple[Shard, ...], limits: GpuLimits, most_columns: int, tokens: int) -> Cut:
    """The cut of least modelled time.

    Args:
        shards: of the launch.
        limits: the GPU.
        most_columns: tile columns a warp may have.
        tokens: the most that the arithmetic serves in a tile.
    """
    found = []
    for columns in (1, 2)[:most_columns]:
        found += _of_list(shards, limits, columns, tokens) + _of_strips(shards, limits, columns, tokens)
    return min(found, key=lambda pair: pair[0])[1]


def _item_us(columns: int) -> float:
    return _ITEM_US + _COLUMN_US * columns


def _end_us(columns: int) -> float:
    return _END_US + _COLUMN_END_US * columns


def _add_us(columns: int, tokens: int, pieces: float) -> float:
    """Of adding up the pieces of a strip: with more tokens its blocks share that."""
    return _ADD_US * columns * tokens * (pieces if tokens <= _ALONE_TOKENS else 1)


def _strips(shards: Sequence[Shard], columns: int) -> list[int]:
    return [-(-shard.out_features // (COLUMN_CHANNELS * columns)) for shard in shards]


def _of_list(shards: Sequence[Shard], limits: GpuLimits, columns: int, tokens: int) -> list[tuple[float, Cut]]:
    """Every block takes an equal part of the whole list, and mostly ends one strip and part of a second."""
    strips = _strips(shards, columns)
    items = sum(count * (shard.in_features // BLOCK) for count, shard in zip(strips, shards, strict=True))
    blocks = min(limits.multiprocessors, items)
    ends = _end_us(columns) + _SECOND_END_US + _EXCHANGE_US + _add_us(columns, tokens, 1 + blocks / sum(strips))
    return [(-(-items // blocks) * _item_us(columns) + ends, Cut(columns, 0, blocks))]


def _of_strips(shards: Sequence[Shard], limits: GpuLimits, columns: int, tokens: int) -> list[tuple[float, Cut]]:
    """Every block takes an equal part of one strip; the shards must be of one depth."""
    depths, strips, found = {shard.in_features // BLOCK for shard in shards}, sum(_strips(shards, columns)), []
    for depth in depths if len(depths) == 1 else ():
        for parts in range(1, depth + 1):
            if parts > 1 and strips * parts > limits.multiprocessors:
                break
            cut = Cut(columns, parts, strips * parts)
            exchange = (parts > 1) * _EXCHANGE_US + _add_us(columns, tokens, parts)
            waves = -(-cut.blocks // limits.multiprocessors)
            each = -(-depth // parts) * _item_us(columns) + _end_us(columns)
            found.append((waves * each + (_CLUSTER_US if clustered(cut, limits) else exchange), cut))
    return found
