"""How the units of a launch are divided among thread blocks."""

import functools
from dataclasses import dataclass

from vllm_exl3.cuda.geometry import GpuLimits

__all__ = ["NARROW", "WIDE", "Costs", "split"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What sharing and ending strips costs, in units of work: from traces of an H200 (docs/kernels-gpu.md).

    Attributes:
        exchange: adding up a strip that blocks share, through memory.
        cluster: the same inside a cluster.
        strip: ending a strip and beginning the next.
        second_strip: the same, where the block has an exchange at both.
    """

    exchange: int
    cluster: int
    strip: int
    second_strip: int


NARROW = Costs(exchange=12, cluster=7, strip=12, second_strip=15)
WIDE = Costs(exchange=6, cluster=6, strip=6, second_strip=8)


@functools.lru_cache(maxsize=4096)
def split(strips: int, depths: frozenset[int], limits: GpuLimits, costs: Costs = NARROW) -> tuple[int, int]:
    """How many blocks share the work, and how many of them form a cluster.

    Either every strip is cut into equal parts, one a block, or the whole list of units is: no block idles then, but
    most end one strip and begin another, and pay for the end of a strip twice. The answer decides the order of fp32
    sums, so nothing else may enter it.

    Args:
        strips: strips of all shards.
        depths: the shards' units of k.
        limits: the GPU.
        costs: of the kernel.
    """
    processors = limits.multiprocessors
    units = strips * max(depths)
    choices = [(-(-units // processors) + costs.exchange + costs.second_strip, min(processors, units), 1)]
    if len(depths) == 1:
        (depth,) = depths
        at_once = dict(limits.clusters)
        for parts in range(1, depth + 1):
            if depth % parts or (parts > 1 and strips * parts > processors):
                continue
            waves = -(-strips * parts // processors)
            clustered = strips <= at_once.get(parts, 0)
            exchange = 0 if parts == 1 else costs.cluster if clustered else costs.exchange
            cost = waves * (depth // parts + costs.strip) - costs.strip + exchange
            choices.append((cost, strips * parts, parts if clustered else 1))
    _, blocks, cluster = min(choices)
    return blocks, cluster
