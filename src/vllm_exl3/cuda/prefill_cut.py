"""How the tiles of a prefill launch are divided among clusters, by estimated time."""

import functools
from dataclasses import dataclass

__all__ = ["Cut", "cut"]

_UNIT_CYCLES = {64: 1250.0, 128: 1450.0, 192: 930.0, 256: 1047.0}
_INT8_UNIT_CYCLES = {64: 1250.0, 128: 1400.0, 192: 680.0, 256: 690.0}
_END_CYCLES = {64: 4500.0, 128: 7500.0, 192: 6000.0, 256: 8000.0}
"""Cycles of a unit, and of a tile's end: measured on an H200 (docs/kernels-prefill.md)."""

_LEAVE_CYCLES = {64: 900.0, 128: 1500.0, 192: 1500.0, 256: 2000.0}
_FINISH_CYCLES, _FINISH_BYTES, _PART_BYTES = 3000.0, 1550.0, 512
"""Of a cut tile: to leave sums in memory; and to launch what adds them, which reads so many bytes a cycle. Sums of int8
products have twice the bytes, and are taken to need twice the time to leave, which was not measured."""

_ENDED_CYCLES, _ENDED_TOKEN_CYCLES = {64: 1800.0, 128: 3000.0}, 30.0
"""The same where clusters end the tiles that they cut, each a share: and for each of the share's tokens."""

_EVEN_FACTOR = {64: 1.05, 128: 1.05, 192: 1.15, 256: 1.15}
"""How much longer units take where every cluster is at another place of k: 1.08 to 1.5 were measured at 256 tokens."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a launch's tiles are divided among clusters.

    Attributes:
        clusters: clusters that run.
        whole_tiles: tiles that one cluster computes from end to end, in turn.
        ranges: equal ranges of units that the remaining tiles are cut into, at most one a cluster.
        cost: estimated time, in cycles.
        ended: whether the clusters end the cut tiles themselves, not a launch of its own.
    """

    clusters: int
    whole_tiles: int
    ranges: int
    cost: float
    ended: bool = False


@functools.lru_cache(maxsize=4096)
def cut(tiles: int, depth: int, tokens: int, clusters: int, *, int8: bool = False, ends: bool = False) -> Cut:
    """Divide tiles of ``depth`` units each among clusters.

    Whole tiles as long as they fill all clusters; what remains is left whole, or cut into equal parts of k, or into
    one range of units a cluster, which leaves no cluster idle but has parts of two tiles in most.

    Args:
        tiles: of the launch.
        depth: units of a tile's k.
        tokens: of a tile.
        clusters: that run at once.
        int8: whether the kernel is the one that multiplies int8.
        ends: whether the kernel can end cut tiles itself, which saves a launch where no cluster has parts of two.
    """
    unit, end = (_INT8_UNIT_CYCLES if int8 else _UNIT_CYCLES)[tokens], _END_CYCLES[tokens]
    size = 2 if int8 else 1  # of a part, to that of one in fp16
    leave = _LEAVE_CYCLES[tokens] * size
    waves, rest = divmod(tiles, clusters)
    full = waves * (depth * unit + end)
    if rest == 0:
        return Cut(clusters, tiles, 0, full)

    def finish(parts: int) -> float:
        return _FINISH_CYCLES + parts * tokens * _PART_BYTES * size / _FINISH_BYTES

    choices = [(full + depth * unit + end, tiles, 0, False)]
    for parts in range(2, min(clusters // rest, depth) + 1):
        ended = ends and depth % parts == 0
        added = _ENDED_CYCLES[tokens] + _ENDED_TOKEN_CYCLES * tokens / parts if ended else finish(rest * parts)
        choices.append((full + -(-depth // parts) * unit + leave + added, tiles - rest, rest * parts, ended))
    if clusters < rest * depth:
        cost = -(-rest * depth // clusters) * unit * _EVEN_FACTOR[tokens] + 2 * leave + finish(clusters + rest)
        choices.append((full + cost, tiles - rest, clusters, False))
    cost, whole, ranges, ended = min(choices)
    return Cut(min(clusters, max(whole, ranges)), whole, ranges, cost, ended)
