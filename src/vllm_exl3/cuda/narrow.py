"""Cuts one fused linear of few tokens into a launch of the narrow kernel: items, ranges, shared memory, scratch.

Arithmetic on shapes, without torch or a GPU; `NarrowShard` and `NarrowArgs` mirror ``kernels/narrow_problem.cuh``
field by field, the constants below its own.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import (
    MAX_SHARDS,
    Form,
    GpuLimits,
    LinearPlan,
    TransformLaunch,
    check_shards,
    fields,
    place_scratch,
    shard_offsets,
)
from vllm_exl3.cuda.narrow_cut import COLUMN_CHANNELS, Cut, choose_cut, clustered
from vllm_exl3.cuda.narrow_memory import NARROW, Kinds, memory_of, most_columns, ring_items
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["MANY", "NarrowArgs", "NarrowShard", "instances_of", "inverse_of", "plan_narrow", "serves_many"]

_WARPS, _THREADS, _ROTATE_THREADS = 16, 512, 128
_TURN_WORDS = 32
"""Behind each piece of a strip: ``TURN_WORDS`` of narrow_finish.cuh."""
_MOST_ITEMS, _MOST_DIVIDED = 1 << 21, 1 << 31
"""Items, and items times a strip's, up to which the kernel's divisions are exact (``quotient`` and ``over`` of
narrow_problem.cuh)."""
_ROTATIONS, _ROTATIONS_OF_MANY = 16, 14
"""Tokens' Hadamard blocks a warp up to which every block rotates its own input instead of a launch before it: in tiles
of up to 16 tokens, and in those of 32, which the wide kernel serves else (docs/kernels-gpu.md)."""
MANY = Form(identity=False, tile_rows=32, narrow=True)
"""How the narrow kernel serves 17 to 32 tokens."""


class NarrowShard(ctypes.Structure):
    """``NarrowShard`` of narrow_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        *fields(ctypes.c_uint64, "trellis"),
        *fields(ctypes.c_uint32, "first_item", "end_item", "out_features", "depth", "depth_inverse", "half_bits"),
        *fields(ctypes.c_uint64, "suh", "svh"),
        *fields(ctypes.c_uint32, "kind", "first_strip", "first_record", "crop_start", "crop_size", "out_column"),
    )


class NarrowArgs(ctypes.Structure):
    """``NarrowArgs`` of narrow_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        *fields(ctypes.c_uint32, "parts", "parts_inverse", "range_items", "longer_ranges"),
        ("shards", NarrowShard * MAX_SHARDS),
        *fields(ctypes.c_uint64, "out", "bias", "partials", "counters", "x", "records"),
        *fields(ctypes.c_int64, "x_stride"),
        *fields(ctypes.c_uint32, "rows", "in_width", "x_type", "kept_items", "kept_halves", "record_bytes"),
        *fields(ctypes.c_uint32, "total_records", "shard_count"),
        *fields(ctypes.c_int64, "out_stride"),
        *fields(ctypes.c_uint32, "out_type", "bias_type", "total_strips", "range_inverse", "longer_inverse"),
    )


def inverse_of(divisor: int) -> int:
    """What ``over`` of narrow_problem.cuh divides by."""
    return -(-(1 << 31) // divisor)


@functools.lru_cache(maxsize=4096)
def plan_narrow(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    form: Form,
    limits: GpuLimits,
    cut: Cut | None = None,
    rotated: bool | None = None,
) -> LinearPlan:
    """Cut one fused linear into work for the narrow kernel.

    Args:
        shards: at most `MAX_SHARDS`.
        rows: tokens.
        in_width: columns of the input; up to a shard's ``in_features`` the rest counts as zero.
        form: how to multiply; at most 16 tokens a tile, or `MANY`.
        limits: the GPU.
        cut: how to divide the work; None chooses by modelled time.
        rotated: whether a launch before it rotates the input; None decides by its cost. It changes no bit.

    Raises:
        ValueError: a shard breaks the layout's rules, the launch has more items than the kernel can divide (2^21 of
            them are 69 billion weights), or the GPU has too little shared memory.
    """
    check_shards(shards, in_width)
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    if cut is None:
        tokens = form.tile_rows if form.identity else NARROW
        cut = choose_cut(shards, limits, most_columns(form, kinds, limits), tokens)
    arguments, channels = NarrowArgs(), COLUMN_CHANNELS * cut.columns
    strips, items, records, columns = _place(arguments, shards, kinds, channels)
    depth, deepest = shards[0].in_features // BLOCK, max(shard.in_features for shard in shards) // BLOCK
    range_items, longer_ranges = divmod(items, cut.blocks)
    if items >= _MOST_ITEMS or items * max(deepest, range_items + 1) >= _MOST_DIVIDED:
        raise ValueError(
            f"found {items} items of 128 × {channels} weights in one linear, {deepest} a strip and {range_items} a "
            f"block; expected fewer than {_MOST_ITEMS} in all, and less than {_MOST_DIVIDED} times either of the others"
        )
    tile = min(rows, form.tile_rows)
    longest = -(-depth // cut.parts) if cut.parts else range_items + (longer_ranges > 0)
    if rotated is None:
        rotated = tile * longest > (_ROTATIONS_OF_MANY if form.narrow else _ROTATIONS) * _WARPS
    memory, together = memory_of(form, kinds, limits, cut, tile, longest, rotated), clustered(cut, limits)
    row_tiles = -(-rows // form.tile_rows)
    sizes = {}
    if not together:
        sizes["partials"] = row_tiles * (cut.blocks + strips) * (tile * channels + _TURN_WORDS) * 4
    if rotated:
        sizes["records"] = row_tiles * records * memory.record
    if row_tiles > 1 and not together:  # the device's own counters are for launches of one tile
        sizes["counters"] = 4 * strips * row_tiles
    scratch_parts, scratch = place_scratch(sizes)
    values = {
        "shard_count": len(shards), "rows": rows, "in_width": in_width, "parts": cut.parts,
        "parts_inverse": inverse_of(cut.parts or 1), "range_items": depth if cut.parts else range_items,
        "longer_ranges": longer_ranges, "total_strips": strips, "kept_items": memory.kept,
        "range_inverse": inverse_of(max(1, range_items)), "longer_inverse": inverse_of(range_items + 1),
        "kept_halves": memory.halves, "total_records": records, "record_bytes": memory.record,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return LinearPlan(
        instance=_instance(form, kinds, cut.columns, memory.ring, together),
        arguments=bytes(arguments),
        arguments_type=NarrowArgs,
        offsets=shard_offsets(shards),
        grid=(cut.blocks, row_tiles),
        threads=_THREADS,
        shared=memory.shared,
        transform=TransformLaunch(_rotation(form, kinds), (records, row_tiles), _ROTATE_THREADS, memory.record)
        if rotated
        else None,
        cluster=cut.parts if together else 1,
        counters=0 if together or "counters" in scratch_parts else strips,
        scratch=scratch,
        scratch_parts=scratch_parts,
        out_features=columns,
    )


def serves_many(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> bool:
    """Whether 17 to 32 tokens are better served here than by the wide kernel.

    Where every block rotates the little input that it multiplies, there is no launch before. More than two kinds of
    shards do not fit the registers.
    """
    if len({(shard.half_bits, shard.codebook) for shard in shards}) > 2:
        return False
    width = min(shard.in_features for shard in shards)
    return plan_narrow(shards, rows, width, MANY, limits).transform is None


def _macros(form: Form, kinds: Kinds) -> tuple[tuple[str, str], ...]:
    return ("INSTANCE_TILE_ROWS", str(form.tile_rows)), ("INSTANCE_KINDS", form.kinds(kinds))


def _instance(form: Form, kinds: Kinds, columns: int, ring: int, together: bool) -> Instance:
    macros = (
        ("INSTANCE_COLUMNS", str(columns)),
        ("INSTANCE_RING", str(ring)),
        ("INSTANCE_CLUSTER", str(int(together))),
    )
    return Instance("narrow.cu", "exl3_narrow", macros + _macros(form, kinds))


def _rotation(form: Form, kinds: Kinds) -> Instance:
    return Instance("narrow_rotate.cu", "exl3_narrow_rotate", _macros(form, kinds))


def instances_of(kinds: Kinds, form: Form, limits: GpuLimits) -> list[Instance]:
    """Every kernel that layers of these kinds may use in a form, whatever their shape and however many clusters run."""
    found = [_rotation(form, kinds)]
    for columns in range(1, most_columns(form, kinds, limits) + 1):
        for clusters in ((), ((2, 1),)) if limits.dependent_launch else ((),):
            some, cut = replace(limits, clusters=clusters), Cut(columns, 2, 2)
            ring = ring_items(form, kinds, some, cut)
            found.append(_instance(form, kinds, columns, ring, clustered(cut, some)))
    return found


def _place(arguments: NarrowArgs, shards: Sequence[Shard], kinds: Kinds, channels: int) -> tuple[int, int, int, int]:
    """Fill in the shards' arguments; gives strips, items, records and columns."""
    strips = items = records = columns = 0
    for index, shard in enumerate(shards):
        shard_strips, depth = -(-shard.out_features // channels), shard.in_features // BLOCK
        arguments.shards[index] = NarrowShard(
            first_item=items,
            end_item=items + shard_strips * depth,
            out_features=shard.out_features,
            depth=depth,
            depth_inverse=inverse_of(depth),
            half_bits=shard.half_bits,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            first_strip=strips,
            first_record=records,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=columns,
        )
        strips += shard_strips
        items += shard_strips * (shard.in_features // BLOCK)
        records += shard.in_features // BLOCK
        columns += shard.crop_size
    return strips, items, records, columns
