"""How the k blocks of the wide kernel's launch are divided among thread blocks."""

import functools

from vllm_exl3.cuda.geometry import GpuLimits

__all__ = ["split"]

_EXCHANGE, _N_TILE_COST, _SECOND_COST = 6, 6, 8
"""Costs of sharing and finishing n tiles, in k blocks of work: adding up an n tile that blocks share; ending an n tile
and beginning the next; the same where the block has an exchange at both. From traces of an H200
(docs/notes/kernels-gpu.md)."""


@functools.lru_cache(maxsize=4096)
def split(n_tiles: int, depths: frozenset[int], limits: GpuLimits) -> int:
    """How many blocks share the work.

    Either split-K, an equal part of an n tile for each block, or stream-K over the list of k blocks: no block idles
    then, but most finish one n tile and begin another, and pay for an epilogue twice. The answer decides the order of
    fp32 sums, so nothing else may enter it.

    Args:
        n_tiles: n tiles of all shards.
        depths: the shards' k blocks of k.
        limits: the GPU.
    """
    processors = limits.multiprocessors
    k_blocks = n_tiles * max(depths)
    choices = [(-(-k_blocks // processors) + _EXCHANGE + _SECOND_COST, min(processors, k_blocks))]
    if len(depths) == 1:
        (depth,) = depths
        for splits in range(1, depth + 1):
            if depth % splits or (splits > 1 and n_tiles * splits > processors):
                continue
            waves = -(-n_tiles * splits // processors)
            cost = waves * (depth // splits + _N_TILE_COST) - _N_TILE_COST + (splits > 1) * _EXCHANGE
            choices.append((cost, n_tiles * splits))
    return min(choices)[1]
