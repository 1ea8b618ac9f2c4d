"""Partitions one fused linear of few tokens into a launch of the narrow kernel: ranges, shared memory, scratch.

Arithmetic on shapes, without torch or a GPU.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants, members
from vllm_exl3.cuda.geometry import (
    Form,
    GpuLimits,
    LinearPlan,
    TransformLaunch,
    check_shards,
    place_scratch,
    shard_offsets,
)
from vllm_exl3.cuda.narrow_memory import NARROW, Kinds, memory_of, most_columns, pipeline_stages
from vllm_exl3.cuda.narrow_partition import COLUMN_CHANNELS, NarrowPartition, choose_partition, clustered
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["NARROW_32", "NarrowArgs", "NarrowShard", "instances_of", "inverse_of", "plan_narrow", "serves_narrow_32"]

_DEVICE = constants("narrow/partials.cuh")
_WARPS, _THREADS, _ROTATE_THREADS = (_DEVICE[name] for name in ("WARPS", "THREADS", "ROTATE_THREADS"))
_ROLE_WORDS = _DEVICE["ROLE_WORDS"]
"""Words behind a block's partial sums of an n tile, one of which is its role in the reduction."""
_MOST_K_BLOCKS, _MOST_DIVIDED = 1 << 21, 1 << 31
"""K blocks, and k blocks times an n tile's, up to which the kernel's divisions are exact (``quotient`` and ``over`` of
narrow/arguments.cuh)."""
_ROTATIONS, _ROTATIONS_OF_32 = 16, 14
"""Tokens' Hadamard blocks a warp up to which every block rotates its own input instead of a launch before it: in tiles
of up to 16 tokens, and in those of 32, which the wide kernel serves else (docs/notes/kernels-gpu.md)."""
NARROW_32 = Form(identity=False, tile_rows=32, narrow=True)
"""How the narrow kernel serves 17 to 32 tokens."""


class NarrowShard(ctypes.Structure):
    """``NarrowShard`` of narrow/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("narrow/arguments.cuh", "NarrowShard")


class NarrowArgs(ctypes.Structure):
    """``NarrowArgs`` of narrow/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("narrow/arguments.cuh", "NarrowArgs", NarrowShard)


def inverse_of(divisor: int) -> int:
    """The inverse that ``fast_divide`` of narrow/arguments.cuh takes for a divisor."""
    return -(-(1 << 31) // divisor)


@functools.lru_cache(maxsize=4096)
def plan_narrow(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    form: Form,
    limits: GpuLimits,
    partition: NarrowPartition | None = None,
    rotated: bool | None = None,
) -> LinearPlan:
    """Cut one fused linear into work for the narrow kernel.

    Args:
        shards: at most `MAX_SHARDS`.
        rows: tokens.
        in_width: columns of the input; up to a shard's ``in_features`` the rest counts as zero.
        form: how to multiply; at most 16 tokens a tile, or `NARROW_32`.
        limits: the GPU.
        partition: how to divide the work; None chooses by modelled time.
        rotated: whether a launch before it rotates the input; None decides by its cost. It changes no bit.

    Raises:
        ValueError: a shard breaks the layout's rules, the launch has more k blocks than the kernel can divide (2^21 of
            them are 69 billion weights), or the GPU has too little shared memory.
    """
    check_shards(shards, in_width)
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    if partition is None:
        tokens = form.tile_rows if form.identity else NARROW
        partition = choose_partition(shards, limits, most_columns(form, kinds, limits), tokens)
    arguments, channels = NarrowArgs(), COLUMN_CHANNELS * partition.columns
    n_tiles, k_blocks, records, columns = _place(arguments, shards, kinds, channels)
    depth, deepest = shards[0].in_features // BLOCK, max(shard.in_features for shard in shards) // BLOCK
    range_k_blocks, longer_ranges = divmod(k_blocks, partition.blocks)
    if k_blocks >= _MOST_K_BLOCKS or k_blocks * max(deepest, range_k_blocks + 1) >= _MOST_DIVIDED:
        raise ValueError(
            f"found {k_blocks} k blocks of 128 × {channels} weights in one linear, {deepest} an n tile and "
            f"{range_k_blocks} a thread block; expected fewer than {_MOST_K_BLOCKS} in all, and less than "
            f"{_MOST_DIVIDED} times either of the others"
        )
    tile = min(rows, form.tile_rows)
    longest = -(-depth // partition.splits) if partition.splits else range_k_blocks + (longer_ranges > 0)
    if rotated is None:
        rotated = tile * longest > (_ROTATIONS_OF_32 if form.narrow else _ROTATIONS) * _WARPS
    memory, clustered_splits = (
        memory_of(form, kinds, limits, partition, tile, longest, rotated),
        clustered(partition, limits),
    )
    row_tiles = -(-rows // form.tile_rows)
    sizes = {}
    if not clustered_splits:
        sizes["partials"] = row_tiles * (partition.blocks + n_tiles) * (tile * channels + _ROLE_WORDS) * 4
    if rotated:
        sizes["records"] = row_tiles * records * memory.record
    if row_tiles > 1 and not clustered_splits:  # the device's own counters are for launches of one tile
        sizes["counters"] = 4 * n_tiles * row_tiles
    scratch_parts, scratch = place_scratch(sizes)
    values = {
        "shard_count": len(shards), "rows": rows, "in_width": in_width, "splits": partition.splits,
        "splits_inverse": inverse_of(partition.splits or 1),
        "range_k_blocks": depth if partition.splits else range_k_blocks,
        "longer_ranges": longer_ranges, "n_tiles": n_tiles, "cached_k_blocks": memory.cached,
        "range_inverse": inverse_of(max(1, range_k_blocks)), "longer_inverse": inverse_of(range_k_blocks + 1),
        "cache_buffers": memory.buffers, "total_records": records, "record_bytes": memory.record,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return LinearPlan(
        instance=_instance(form, kinds, partition.columns, memory.stages, clustered_splits),
        arguments=bytes(arguments),
        arguments_type=NarrowArgs,
        offsets=shard_offsets(shards),
        grid=(partition.blocks, row_tiles),
        threads=_THREADS,
        shared=memory.shared,
        transform=TransformLaunch(_rotation(form, kinds), (records, row_tiles), _ROTATE_THREADS, memory.record)
        if rotated
        else None,
        cluster=partition.splits if clustered_splits else 1,
        counters=0 if clustered_splits or "counters" in scratch_parts else n_tiles,
        scratch=scratch,
        scratch_parts=scratch_parts,
        out_features=columns,
    )


def serves_narrow_32(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> bool:
    """True where 17 to 32 tokens are better served here than by the wide kernel.

    Where every block rotates the little input that it multiplies, there is no launch before. More than two kinds of
    shards do not fit the registers.
    """
    if len({(shard.half_bits, shard.codebook) for shard in shards}) > 2:
        return False
    width = min(shard.in_features for shard in shards)
    return plan_narrow(shards, rows, width, NARROW_32, limits).transform is None


def _macros(form: Form, kinds: Kinds) -> tuple[tuple[str, str], ...]:
    return ("INSTANCE_TILE_ROWS", str(form.tile_rows)), ("INSTANCE_KINDS", form.kinds(kinds))


def _instance(form: Form, kinds: Kinds, columns: int, stages: int, clustered_splits: bool) -> Instance:
    macros = (
        ("INSTANCE_COLUMNS", str(columns)),
        ("INSTANCE_STAGES", str(stages)),
        ("INSTANCE_CLUSTER", str(int(clustered_splits))),
    )
    return Instance("narrow/narrow.cu", "exl3_narrow", macros + _macros(form, kinds))


def _rotation(form: Form, kinds: Kinds) -> Instance:
    return Instance("narrow/rotate.cu", "exl3_narrow_rotate", _macros(form, kinds))


def instances_of(kinds: Kinds, form: Form, limits: GpuLimits) -> list[Instance]:
    """Every kernel that layers of these kinds may use in a form, whatever their shape and however many clusters run."""
    found = [_rotation(form, kinds)]
    for columns in range(1, most_columns(form, kinds, limits) + 1):
        for clusters in ((), ((2, 1),)) if limits.dependent_launch else ((),):
            some, partition = replace(limits, clusters=clusters), NarrowPartition(columns, 2, 2)
            stages = pipeline_stages(form, kinds, some, partition)
            found.append(_instance(form, kinds, columns, stages, clustered(partition, some)))
    return found


def _place(arguments: NarrowArgs, shards: Sequence[Shard], kinds: Kinds, channels: int) -> tuple[int, int, int, int]:
    """Fill in the shards' arguments; gives n tiles, k blocks, records and columns."""
    n_tiles = k_blocks = records = columns = 0
    for index, shard in enumerate(shards):
        shard_n_tiles, depth = -(-shard.out_features // channels), shard.in_features // BLOCK
        arguments.shards[index] = NarrowShard(
            first_k_block=k_blocks,
            end_k_block=k_blocks + shard_n_tiles * depth,
            out_features=shard.out_features,
            depth=depth,
            depth_inverse=inverse_of(depth),
            half_bits=shard.half_bits,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            first_n_tile=n_tiles,
            first_record=records,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=columns,
        )
        n_tiles += shard_n_tiles
        k_blocks += shard_n_tiles * (shard.in_features // BLOCK)
        records += shard.in_features // BLOCK
        columns += shard.crop_size
    return n_tiles, k_blocks, records, columns
