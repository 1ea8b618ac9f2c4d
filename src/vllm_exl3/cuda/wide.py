"""Cuts one fused linear into a transform and a launch of the wide kernel (linear_wide.cu): from 17 tokens, Hopper."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import (
    HALF_TILES,
    ROW_PAD,
    UNIT_IN,
    Form,
    GpuLimits,
    LinearArgs,
    LinearPlan,
    ShardArgs,
    TransformLaunch,
    check_shards,
    place_scratch,
    shard_offsets,
)
from vllm_exl3.cuda.split import split
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["TRANSFORM", "plan_wide"]

TRANSFORM, _TRANSFORM_THREADS = Instance("transform.cu", "exl3_transform"), 896
"""The kernel that rotates inputs for the wide kernel, and its threads a block."""

_THREADS, _STAGING, _CHUNK, _OUTPUT_PITCH = 512, 512, 32, (BLOCK + 4) * 4
"""Of linear_wide.cuh: threads, bytes before the staging area, tokens staged at once, bytes of a staged token."""

_SPLIT_UNITS = 80
"""Units of two Hadamard blocks a block of the wide kernel up to which it splits k between its pairs instead."""


@functools.lru_cache(maxsize=4096)
def plan_wide(shards: tuple[Shard, ...], rows: int, in_width: int, form: Form, limits: GpuLimits) -> LinearPlan:
    """Cut one fused linear into a transform and a launch of the wide kernel.

    Args:
        shards: at most `MAX_SHARDS`.
        rows: tokens.
        in_width: columns of the input; up to a shard's ``in_features`` the rest counts as zero.
        form: how to multiply; 32, 64 or 128 tokens a tile.
        limits: the GPU.

    Raises:
        ValueError: a shard breaks the layout's rules, or the GPU has no wgmma.
    """
    if not limits.warpgroups:
        raise ValueError(f"{limits.architecture} has no wgmma, which {form.name} needs")
    check_shards(shards, in_width)
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    row_tiles = -(-rows // form.tile_rows)
    arguments = LinearArgs()
    split_k = _splits_k(shards, limits)
    strip = BLOCK if split_k else 2 * BLOCK
    totals = _place_shards(arguments, shards, kinds, row_tiles, form.tile_rows, strip)
    depths = frozenset(shard.in_features // UNIT_IN for shard in shards)
    blocks = split(totals.strips, depths, limits)
    range_units, longer_ranges = divmod(totals.units, blocks)
    half_stride = max(4 * (HALF_TILES * 16 * half_bits + ROW_PAD) for half_bits, _ in kinds)

    activation_stride = _activation_bytes(form.tile_rows)
    groups, staged = (2, form.tile_rows) if split_k else (1, 2 * _CHUNK)
    fixed, stage = _STAGING + staged * _OUTPUT_PITCH, 4 // groups * half_stride + activation_stride
    stages = min(8, (limits.shared_memory - fixed) // (groups * stage))
    partial_stride = form.tile_rows // 8 // groups * _THREADS
    macros = (
        ("INSTANCE_TILE_ROWS", str(form.tile_rows)),
        ("INSTANCE_SPLIT_K", str(int(split_k))),
        ("INSTANCE_KINDS", form.kinds(kinds)),
    )

    parts = max(1, min(max(shard.in_features for shard in shards) // BLOCK // 4, 16, limits.multiprocessors // rows))
    counters = totals.strips * row_tiles
    sizes = {
        "partials": row_tiles * 2 * blocks * partial_stride * 16,
        "activations": row_tiles * totals.activations,
        "scales": 4 * len(shards) * rows,
        "counters": 4 * counters,
    }
    scratch_parts, scratch = place_scratch(sizes)
    values = {
        "shard_count": len(shards), "rows": rows, "row_tiles": row_tiles, "tile_rows": form.tile_rows,
        "stored_rows": form.tile_rows, "in_width": in_width, "parts": parts, "range_units": range_units,
        "longer_ranges": longer_ranges, "total_strips": totals.strips, "partial_stride": partial_stride,
        "half_stride": half_stride, "strip_tiles": strip // 16, "ring_units": stages,
        "activation_stride": activation_stride,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return LinearPlan(
        instance=Instance("linear_wide.cu", "exl3_linear_wide", macros),
        arguments=bytes(arguments),
        arguments_type=LinearArgs,
        offsets=shard_offsets(shards),
        grid=(blocks, row_tiles),
        threads=_THREADS,
        shared=fixed + groups * stages * stage,
        transform=TransformLaunch(TRANSFORM, (parts, rows), _TRANSFORM_THREADS),
        counters=0,
        scratch=scratch,
        scratch_parts=scratch_parts,
        out_features=totals.columns,
    )


@dataclass(slots=True)
class _Totals:
    """Sums over a launch's shards: units, strips, bytes of activations a row tile, output columns."""

    units: int = 0
    strips: int = 0
    activations: int = 0
    columns: int = 0


def _activation_bytes(rows: int) -> int:
    """Bytes of one unit's transformed activations."""
    return UNIT_IN * 2 * rows


def _place_shards(
    arguments: LinearArgs,
    shards: Sequence[Shard],
    kinds: Sequence[tuple[int, int]],
    row_tiles: int,
    tile_rows: int,
    strip: int,
) -> _Totals:
    """Fill in the shards' arguments; gives sums over them."""
    totals = _Totals()
    for index, shard in enumerate(shards):
        strips, depth = -(-shard.out_features // strip), shard.in_features // UNIT_IN
        arguments.shards[index] = ShardArgs(
            in_features=shard.in_features,
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=totals.columns,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            half_bits=shard.half_bits,
            first_unit=totals.units,
            first_strip=totals.strips,
            activation_block=row_tiles * totals.activations // 16,
        )
        totals.units += strips * depth
        totals.strips += strips
        totals.activations += depth * _activation_bytes(tile_rows)
        totals.columns += shard.crop_size
    return totals


def _splits_k(shards: Sequence[Shard], limits: GpuLimits) -> bool:
    """Whether the wide kernel's pairs take turns at k: it depends on (N, K) alone, as it decides the order of sums."""
    units = sum(-(-shard.out_features // (2 * BLOCK)) * (shard.in_features // UNIT_IN) for shard in shards)
    return units <= _SPLIT_UNITS * limits.multiprocessors
