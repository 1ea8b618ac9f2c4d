"""What the prefill kernels are told: structures that mirror ``kernels/prefill_problem.cuh`` field by field."""

import ctypes
from collections.abc import Sequence

from vllm_exl3.cuda.geometry import MAX_SHARDS, fields
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

__all__ = ["PrefillArgs", "PrefillShard", "place_shards"]


class PrefillShard(ctypes.Structure):
    """``PrefillShard`` of prefill_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        *fields(ctypes.c_uint64, "trellis", "suh", "svh"),
        *fields(ctypes.c_uint32, "out_features", "crop_start", "crop_size", "out_column", "kind", "half_bits"),
        *fields(ctypes.c_uint32, "first_strip", "complements"),
    )


class PrefillArgs(ctypes.Structure):
    """``PrefillArgs`` of prefill_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        ("shards", PrefillShard * MAX_SHARDS),
        *fields(ctypes.c_uint64, "x", "out", "bias", "activations", "scales", "offsets", "partials", "arrivals"),
        *fields(ctypes.c_int64, "x_stride", "out_stride"),
        *fields(ctypes.c_uint32, "shard_count", "rows", "row_tiles", "tile_rows", "in_width", "in_features"),
        *fields(ctypes.c_uint32, "x_type", "out_type", "bias_type", "strips", "group", "whole_tiles"),
        *fields(ctypes.c_uint32, "range_units", "longer_ranges", "ranges", "stages", "weight_bytes"),
        *fields(
            ctypes.c_uint32, "strip_blocks", "block_rows", "holds", "sharing", "equal_parts", "offset_parts", "padding"
        ),
    )


def place_shards(
    arguments: PrefillArgs,
    shards: Sequence[Shard],
    kinds: Sequence[tuple[int, int]],
    strip: int,
    *,
    complements: bool = False,
) -> None:
    """Fill in the arguments of a launch's shards, and how many strips they have.

    Args:
        arguments: of the launch.
        shards: of one fused linear.
        kinds: (half_bits, codebook) of its kernel's instance.
        strip: output channels of a strip.
        complements: whether activations of mul1 shards are stored for byte sums (codebook.cuh).
    """
    strips = column = 0
    for index, shard in enumerate(shards):
        arguments.shards[index] = PrefillShard(
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=column,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            half_bits=shard.half_bits,
            first_strip=strips,
            complements=int(complements and shard.codebook == Codebook.MUL1),
        )
        strips += -(-shard.out_features // strip)
        column += shard.crop_size
    arguments.strips = strips
