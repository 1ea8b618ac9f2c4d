"""Cuts one fused linear of few tokens into a launch of the narrow kernel: items, ranges, shared memory, scratch.

Arithmetic on shapes, without torch or a GPU; `NarrowShard` and `NarrowArgs` mirror ``kernels/narrow_problem.cuh``
field by field, the sizes below its constants and those of ``narrow_activations.cuh`` and ``narrow_ring.cuh``.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import (
    MAX_SHARDS,
    ROW_PAD,
    Arithmetic,
    Form,
    GpuLimits,
    LinearPlan,
    ShardOffsets,
    TransformLaunch,
    check_shards,
    round_up,
)
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["Cut", "NarrowArgs", "NarrowShard", "plan_narrow"]

_WARPS, _THREADS, _ITEM_TILES = 16, 512, 8
_ALIGN = 256
_ROTATIONS = 7
"""Tokens' Hadamard blocks a warp up to which every block rotates its own input instead of a launch before it."""

_RINGS, _LEAST_KEPT, _STATIC_BYTES = (2, 3, 4, 6, 8), 4, 128
_IN_FLIGHT = 96 << 10
"""Bytes a multiprocessor that cover the latency of DRAM, with room to spare."""


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class NarrowShard(ctypes.Structure):
    """``NarrowShard`` of narrow_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        *_fields(ctypes.c_uint64, "trellis", "suh", "svh"),
        *_fields(ctypes.c_uint32, "in_features", "out_features", "crop_start", "crop_size", "out_column", "kind"),
        *_fields(ctypes.c_uint32, "half_bits", "codebook", "arithmetic", "first_item", "first_strip"),
        *_fields(ctypes.c_uint32, "first_record"),
    )


class NarrowArgs(ctypes.Structure):
    """``NarrowArgs`` of narrow_problem.cuh."""

    __slots__ = ()
    _fields_ = (
        ("shards", NarrowShard * MAX_SHARDS),
        *_fields(ctypes.c_uint64, "x", "out", "bias", "partials", "records", "counters"),
        *_fields(ctypes.c_int64, "x_stride", "out_stride"),
        *_fields(ctypes.c_uint32, "shard_count", "rows", "in_width", "x_type", "out_type", "bias_type"),
        *_fields(ctypes.c_uint32, "parts", "depth", "range_items", "longer_ranges", "total_strips", "kept_items"),
        *_fields(ctypes.c_uint32, "total_records"),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """How a launch's items are divided among blocks. It decides the order of fp32 sums.

    Attributes:
        columns: tile columns a warp multiplies; a strip is 256 channels times that.
        parts: blocks that share a strip equally, or 0 where the whole list is cut.
        blocks: thread blocks a row tile.
    """

    columns: int
    parts: int
    blocks: int


_ITEM_US, _COLUMN_US = 0.26, 0.655
"""Microseconds of an item of 128 × 256 weights on one multiprocessor of an H200, and of each tile column of it."""

_END_US, _SECOND_END_US, _EXCHANGE_US, _ADD_US = 0.5, 2.0, 0.9, 0.06
"""Of ending a piece of a strip, for each tile column; of a second end in a block; of waiting for other blocks' pieces;
of adding one up. From measurements on an H200 (docs/kernels-gpu.md)."""


def _cuts(shards: Sequence[Shard], limits: GpuLimits, most_columns: int) -> list[tuple[float, Cut]]:
    """Every sensible cut with its modelled microseconds."""
    depths = {shard.in_features // BLOCK for shard in shards}
    found = []
    for columns in (1, 2)[:most_columns]:
        shard_strips = [-(-shard.out_features // (_WARPS * 16 * columns)) for shard in shards]
        strips = sum(shard_strips)
        items = sum(count * (shard.in_features // BLOCK) for count, shard in zip(shard_strips, shards, strict=True))
        item_us, end_us = _ITEM_US + _COLUMN_US * columns, 0.5 + _END_US * columns
        blocks = min(limits.multiprocessors, items)
        each = -(-items // blocks)
        # A block's contiguous range ends one strip and, mostly, part of a second.
        cost = each * item_us + end_us + _SECOND_END_US + _EXCHANGE_US + (1 + blocks / strips) * _ADD_US
        found.append((cost, Cut(columns, 0, blocks)))
        if len(depths) == 1:
            (depth,) = depths
            for parts in range(1, depth + 1):
                if parts > 1 and strips * parts > limits.multiprocessors:
                    break
                waves = -(-strips * parts // limits.multiprocessors)
                cost = waves * (-(-depth // parts) * item_us + end_us) + (parts > 1) * _EXCHANGE_US + parts * _ADD_US
                found.append((cost, Cut(columns, parts, strips * parts)))
    return found


@functools.lru_cache(maxsize=4096)
def choose_cut(shards: tuple[Shard, ...], limits: GpuLimits, most_columns: int) -> Cut:
    """The cut of least modelled time."""
    return min(_cuts(shards, limits, most_columns), key=lambda pair: pair[0])[1]


def _record_bytes(arithmetic: Arithmetic, tile_rows: int) -> int:
    """``Record::bytes`` of narrow_activations.cuh."""
    tokens = tile_rows if arithmetic is Arithmetic.INTEGER else max(8, tile_rows)
    planes = 2 * tokens if arithmetic is Arithmetic.INTEGER else tokens
    return 2 * (2 if arithmetic is Arithmetic.HALF else 4) * planes * 64 + 8 * planes + round_up(4 * tokens, 16)


def _slot_bytes(half_bits: int, columns: int) -> int:
    """Bytes of an item's weights in a warp's ring."""
    return _ITEM_TILES * (16 * columns * half_bits + ROW_PAD)


def _most_columns(form: Form, kinds: Sequence[tuple[int, int]], limits: GpuLimits) -> int:
    """Tile columns a warp may have: sums must fit the registers, three items of its ring and two records the memory.

    The same for every tile of an arithmetic class, since columns decide the order of sums.
    """
    if not form.identity:  # measured: more are no faster, and leave no register to spare
        return 1
    records = max(_record_bytes(form.arithmetic(codebook), 8) for _, codebook in kinds)
    slot = max(_slot_bytes(half_bits, 2) for half_bits, _ in kinds)
    return 2 if 3 * _WARPS * slot + 2 * records <= limits.shared_memory else 1


def _memory(limits: GpuLimits, slot: int, record: int, items: int) -> tuple[int, int]:
    """Items of a warp's ring, and items whose activations are kept.

    The ring is the smallest that keeps enough bytes in flight, or else the largest that fits beside a few records: it
    is part of the kernel, and the same for layers of any depth.
    """
    room = limits.shared_memory - _STATIC_BYTES
    fitting = [ring for ring in _RINGS if _WARPS * ring * slot + _LEAST_KEPT * record <= room] or [_RINGS[0]]
    ring = next((ring for ring in fitting if _WARPS * (ring - 1) * slot >= _IN_FLIGHT), fitting[-1])
    return ring, max(1, min(items, (room - _WARPS * ring * slot) // record))


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
        form: how to multiply; at most 16 tokens a tile.
        limits: the GPU.
        cut: how to divide the work; None chooses by modelled time.
        rotated: whether a launch before it rotates the input; None decides by its cost. It changes no bit.

    Raises:
        ValueError: a shard breaks the layout's rules, or the GPU has too little shared memory.
    """
    check_shards(shards, in_width)
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    if cut is None:
        cut = choose_cut(shards, limits, _most_columns(form, kinds, limits))
    arguments = NarrowArgs()
    offsets, strips, items, records, columns = _place(arguments, shards, kinds, form, _WARPS * 16 * cut.columns)
    depth = shards[0].in_features // BLOCK
    range_items, longer_ranges = divmod(items, cut.blocks)
    slot = max(_slot_bytes(half_bits, cut.columns) for half_bits, _ in kinds)
    record = max(_record_bytes(form.arithmetic(codebook), form.tile_rows) for _, codebook in kinds)
    longest = -(-depth // cut.parts) if cut.parts else range_items + (longer_ranges > 0)
    ring, kept = _memory(limits, slot, record, longest)
    shared = _WARPS * ring * slot + kept * record
    needed = shared + _STATIC_BYTES
    if needed > limits.shared_memory:
        raise ValueError(f"{limits.architecture}: {limits.shared_memory} bytes of shared memory, {needed} are needed")
    row_tiles = -(-rows // form.tile_rows)
    piece = min(rows, form.tile_rows) * _WARPS * 16 * cut.columns * 4
    scratch_parts = {"partials": 0}
    scratch = round_up(row_tiles * (cut.blocks + strips) * piece, _ALIGN)
    if rotated is None:
        rotated = min(rows, form.tile_rows) * longest > _ROTATIONS * _WARPS
    if rotated:
        scratch_parts["records"] = scratch
        scratch += round_up(row_tiles * records * record, _ALIGN)
    if row_tiles > 1:  # the device's own counters are for launches of one tile
        scratch_parts["counters"] = scratch
        scratch += round_up(4 * strips * row_tiles, _ALIGN)
    values = {
        "shard_count": len(shards), "rows": rows, "in_width": in_width, "parts": cut.parts, "depth": depth,
        "range_items": range_items, "longer_ranges": longer_ranges, "total_strips": strips, "kept_items": kept,
        "total_records": records,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    macros = (("INSTANCE_TILE_ROWS", str(form.tile_rows)), ("INSTANCE_KINDS", form.kinds(kinds)))
    own_macros = (("INSTANCE_COLUMNS", str(cut.columns)), ("INSTANCE_RING", str(ring)))
    rotation = Instance("narrow_rotate.cu", "exl3_narrow_rotate", macros)
    return LinearPlan(
        instance=Instance("narrow.cu", "exl3_narrow", own_macros + macros),
        arguments=bytes(arguments),
        arguments_type=NarrowArgs,
        offsets=offsets,
        grid=(cut.blocks, row_tiles),
        threads=_THREADS,
        shared=shared,
        transform=TransformLaunch(rotation, (records, row_tiles), _THREADS) if rotated else None,
        counters=0 if "counters" in scratch_parts else strips,
        scratch=scratch,
        scratch_parts=scratch_parts,
        out_features=columns,
    )


def _place(
    arguments: NarrowArgs, shards: Sequence[Shard], kinds: Sequence[tuple[int, int]], form: Form, channels: int
) -> tuple[tuple[ShardOffsets, ...], int, int, int, int]:
    """Fill in the shards' arguments; gives where each lies in the flat tensors, strips, items, records and columns."""
    offsets, strips, items, records, columns = [], 0, 0, 0, 0
    trellis = suh = svh = 0
    for index, shard in enumerate(shards):
        arguments.shards[index] = NarrowShard(
            in_features=shard.in_features,
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=columns,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            half_bits=shard.half_bits,
            codebook=shard.codebook,
            arithmetic=form.arithmetic(shard.codebook),
            first_item=items,
            first_strip=strips,
            first_record=records,
        )
        offsets.append(ShardOffsets(trellis, suh, svh))
        shard_strips = -(-shard.out_features // channels)
        strips += shard_strips
        items += shard_strips * (shard.in_features // BLOCK)
        records += shard.in_features // BLOCK
        columns += shard.crop_size
        trellis += shard.trellis_words
        suh += shard.in_features
        svh += shard.out_features
    return tuple(offsets), strips, items, records, columns
