"""Launch arguments of the prefill kernels and of the GEMM."""

import ctypes
from collections.abc import Sequence

from vllm_exl3.cuda.declarations import members
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

__all__ = ["PrefillArgs", "PrefillShard", "place_shards"]


class PrefillShard(ctypes.Structure):
    """``PrefillShard`` of prefill/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("prefill/arguments.cuh", "PrefillShard")


class PrefillArgs(ctypes.Structure):
    """``PrefillArgs`` of prefill/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("prefill/arguments.cuh", "PrefillArgs", PrefillShard)


def place_shards(
    arguments: PrefillArgs,
    shards: Sequence[Shard],
    kinds: Sequence[tuple[int, int]],
    n_tile: int,
    *,
    complements: bool = False,
) -> None:
    """Fill in the arguments of a launch's shards, and how many n tiles they have.

    Args:
        arguments: of the launch.
        shards: of one fused linear.
        kinds: (half_bits, codebook) of its kernel's instance.
        n_tile: output channels of an n tile.
        complements: whether activations of mul1 shards are stored for byte sums (base/codebook.cuh).
    """
    n_tiles = column = 0
    for index, shard in enumerate(shards):
        arguments.shards[index] = PrefillShard(
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=column,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            half_bits=shard.half_bits,
            first_n_tile=n_tiles,
            complements=int(complements and shard.codebook == Codebook.MUL1),
        )
        n_tiles += -(-shard.out_features // n_tile)
        column += shard.crop_size
    arguments.n_tiles = n_tiles
