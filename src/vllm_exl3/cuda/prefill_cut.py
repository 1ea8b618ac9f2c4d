"""How the tiles of a prefill launch are divided among clusters, by estimated time."""

import functools
from dataclasses import dataclass

__all__ = ["Cut", "cut"]

_UNIT_CYCLES = {64: 1000.0, 128: 1100.0, 192: 850.0, 256: 1080.0}
_END_CYCLES, _EXCHANGE_CYCLES, _PART_CYCLES = 3500.0, 3000.0, 3000.0
"""Cycles of a unit, of a tile's end, and what cutting a tile adds once and for each part: measured on an H200."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a launch's tiles are divided among clusters.

    Attributes:
        clusters: clusters that run.
        whole_tiles: tiles that one cluster computes from end to end, in turn.
        ranges: equal ranges of units that the remaining tiles are cut into, at most one a cluster.
        cost: estimated time, in cycles.
    """

    clusters: int
    whole_tiles: int
    ranges: int
    cost: float


@functools.lru_cache(maxsize=4096)
def cut(tiles: int, depth: int, tokens: int, clusters: int) -> Cut:
    """Divide tiles of ``depth`` units each among clusters.

    Whole tiles as long as they fill all clusters; what remains is left whole, or cut into equal parts of k, or into
    one range of units a cluster, which leaves no cluster idle but ends two tiles in most.
    """
    unit, end = _UNIT_CYCLES[tokens], _END_CYCLES * tokens / 256
    exchange, part = _EXCHANGE_CYCLES * tokens / 256, _PART_CYCLES * tokens / 256
    waves, rest = divmod(tiles, clusters)
    full = waves * (depth * unit + end)
    if rest == 0:
        return Cut(clusters, tiles, 0, full)
    choices = [(full + depth * unit + end, tiles, 0)]
    for parts in range(2, min(clusters // rest, depth) + 1):
        choices.append((full + -(-depth // parts) * unit + end + exchange + parts * part, tiles - rest, rest * parts))
    if clusters < rest * depth:
        shared = -(-clusters // rest) + 1
        cost = -(-rest * depth // clusters) * unit + 2 * (end + exchange) + shared * part
        choices.append((full + cost, tiles - rest, clusters))
    cost, whole, ranges = min(choices)
    return Cut(min(clusters, max(whole, ranges)), whole, ranges, cost)
