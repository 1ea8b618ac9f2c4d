"""How the units of the wide kernel's launch are divided among thread blocks."""

import functools

from vllm_exl3.cuda.geometry import GpuLimits

__all__ = ["split"]

_EXCHANGE, _STRIP, _SECOND_STRIP = 6, 6, 8
"""What sharing and ending strips costs, in units of work: adding up a strip that blocks share; ending a strip and
beginning the next; the same where the block has an exchange at both. From traces of an H200 (docs/kernels-gpu.md)."""


@functools.lru_cache(maxsize=4096)
def split(strips: int, depths: frozenset[int], limits: GpuLimits) -> int:
    """How many blocks share the work.

    Either every strip is cut into equal parts, one a block, or the whole list of units is: no block idles then, but
    most end one strip and begin another, and pay for the end of a strip twice. The answer decides the order of fp32
    sums, so nothing else may enter it.

    Args:
        strips: strips of all shards.
        depths: the shards' units of k.
        limits: the GPU.
    """
    processors = limits.multiprocessors
    units = strips * max(depths)
    choices = [(-(-units // processors) + _EXCHANGE + _SECOND_STRIP, min(processors, units))]
    if len(depths) == 1:
        (depth,) = depths
        for parts in range(1, depth + 1):
            if depth % parts or (parts > 1 and strips * parts > processors):
                continue
            waves = -(-strips * parts // processors)
            cost = waves * (depth // parts + _STRIP) - _STRIP + (parts > 1) * _EXCHANGE
            choices.append((cost, strips * parts))
    return min(choices)[1]
