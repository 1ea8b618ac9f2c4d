"""What the prefill kernels are told: structures that mirror ``kernels/prefill_problem.cuh`` field by field."""

import ctypes

from vllm_exl3.cuda.geometry import MAX_SHARDS, fields

__all__ = ["PrefillArgs", "PrefillShard"]


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
