"""How the tiles of a prefill launch are divided among clusters, by estimated time."""

import functools
from dataclasses import dataclass

__all__ = ["PrefillPartition", "choose_partition"]

_K_BLOCK_CYCLES = {64: 1250.0, 128: 1450.0, 192: 930.0, 256: 1047.0}
_INT8_K_BLOCK_CYCLES = {64: 1250.0, 128: 1400.0, 192: 680.0, 256: 690.0}
_EPILOGUE_CYCLES = {64: 4500.0, 128: 7500.0, 192: 6000.0, 256: 8000.0}
"""Cycles of a k block, and of a tile's epilogue: measured on an H200 (docs/notes/kernels-prefill.md)."""

_STORE_CYCLES = {64: 900.0, 128: 1500.0, 192: 1500.0, 256: 2000.0}
_FINISH_CYCLES, _FINISH_BYTES, _PART_BYTES = 3000.0, 1550.0, 512
"""Cycles for a split tile: storing partial sums; and launching the reduction, which reads so many bytes a cycle. Sums
of int8 products have twice the bytes, and are taken to need twice the time to leave, which was not measured."""

_REDUCE_CYCLES, _REDUCE_TOKEN_CYCLES = {64: 1800.0, 128: 3000.0}, 30.0
"""The same where clusters reduce the tiles that they split, each a slice: and for each of the slice's tokens."""

_EVEN_FACTOR = {64: 1.05, 128: 1.05, 192: 1.15, 256: 1.15}
"""How much longer k blocks take where every cluster is elsewhere in k: 1.08 to 1.5 were measured at 256 tokens."""


@dataclass(frozen=True, slots=True)
class PrefillPartition:
    """How a launch's tiles are divided among clusters.

    Attributes:
        clusters: clusters that run.
        whole_tiles: tiles that one cluster computes from end to end, in turn.
        ranges: equal ranges of k blocks that the remaining tiles are split into, at most one a cluster.
        cost: estimated time, in cycles.
        reduces: whether the clusters reduce the split tiles themselves, not a launch of its own.
    """

    clusters: int
    whole_tiles: int
    ranges: int
    cost: float
    reduces: bool = False


@functools.lru_cache(maxsize=4096)
def choose_partition(
    tiles: int, depth: int, tokens: int, clusters: int, *, int8: bool = False, reduces: bool = False
) -> PrefillPartition:
    """Divide tiles of ``depth`` k blocks each among clusters.

    Whole tiles as long as they fill all clusters; what remains is left whole, or split into equal parts of k, or into
    one range of k blocks a cluster, which leaves no cluster idle but has parts of two tiles in most.

    Args:
        tiles: of the launch. depth: k blocks of a tile's k. tokens: of a tile. clusters: that run at once. int8:
        whether the kernel is the one that multiplies int8. reduces: whether the kernel can reduce split tiles itself,
        which saves a launch where no cluster has parts of two.
    """
    k_block, end = (_INT8_K_BLOCK_CYCLES if int8 else _K_BLOCK_CYCLES)[tokens], _EPILOGUE_CYCLES[tokens]
    size = 2 if int8 else 1  # of a part, to that of one in fp16
    store = _STORE_CYCLES[tokens] * size
    waves, rest = divmod(tiles, clusters)
    full = waves * (depth * k_block + end)
    if rest == 0:
        return PrefillPartition(clusters, tiles, 0, full)

    def finish(parts: int) -> float:
        return _FINISH_CYCLES + parts * tokens * _PART_BYTES * size / _FINISH_BYTES

    choices = [(full + depth * k_block + end, tiles, 0, False)]
    for parts in range(2, min(clusters // rest, depth) + 1):
        reduces = reduces and depth % parts == 0
        added = _REDUCE_CYCLES[tokens] + _REDUCE_TOKEN_CYCLES * tokens / parts if reduces else finish(rest * parts)
        choices.append((full + -(-depth // parts) * k_block + store + added, tiles - rest, rest * parts, reduces))
    if clusters < rest * depth:
        cost = -(-rest * depth // clusters) * k_block * _EVEN_FACTOR[tokens] + 2 * store + finish(clusters + rest)
        choices.append((full + cost, tiles - rest, clusters, False))
    cost, whole, ranges, reduces = min(choices)
    return PrefillPartition(min(clusters, max(whole, ranges)), whole, ranges, cost, reduces)
