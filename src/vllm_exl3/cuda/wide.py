"""Partitions one fused linear of 17 tokens and more, on Hopper, into a transform and a launch of wide/wide.cu."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import (
    BLOCK_K,
    ROW_PAD,
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

TRANSFORM = Instance("wide/transform.cu", "exl3_transform")
"""The kernel that rotates inputs for the wide kernel."""

_TRANSFORM_THREADS = constants("wide/transform.cu")["TRANSFORM_THREADS"]
_DEVICE = constants("wide/wide.cuh") | constants("wide/epilogue.cuh")
_THREADS, _CHUNK, _OUTPUT_PITCH = _DEVICE["WIDE_THREADS"], _DEVICE["CHUNK"], 4 * _DEVICE["OUTPUT_PITCH"]
_HALF_TILES = constants("wide/cursor.cuh")["HALF_TILES"]
_STAGING = 512
"""Bytes of shared memory before the staging area of wide/wide.cuh."""

_SPLIT_K_BLOCKS = 80
"""K blocks of two Hadamard blocks a block of the wide kernel up to which it splits k between its pairs instead."""


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
    n_tile = BLOCK if split_k else 2 * BLOCK
    totals = _place_shards(arguments, shards, kinds, row_tiles, form.tile_rows, n_tile)
    depths = frozenset(shard.in_features // BLOCK_K for shard in shards)
    blocks = split(totals.n_tiles, depths, limits)
    range_k_blocks, longer_ranges = divmod(totals.k_blocks, blocks)
    half_stride = max(4 * (_HALF_TILES * 16 * half_bits + ROW_PAD) for half_bits, _ in kinds)

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

    transform_blocks = max(
        1, min(max(shard.in_features for shard in shards) // BLOCK // 4, 16, limits.multiprocessors // rows)
    )
    counters = totals.n_tiles * row_tiles
    sizes = {
        "partials": row_tiles * 2 * blocks * partial_stride * 16,
        "activations": row_tiles * totals.activations,
        "scales": 4 * len(shards) * rows,
        "counters": 4 * counters,
    }
    scratch_parts, scratch = place_scratch(sizes)
    values = {
        "shard_count": len(shards), "rows": rows, "row_tiles": row_tiles, "tile_rows": form.tile_rows,
        "stored_rows": form.tile_rows, "in_width": in_width,
        "transform_blocks": transform_blocks, "range_k_blocks": range_k_blocks,
        "longer_ranges": longer_ranges, "n_tiles": totals.n_tiles, "partial_stride": partial_stride,
        "half_stride": half_stride, "n_tile_columns": n_tile // 16, "pipeline_stages": stages,
        "activation_stride": activation_stride,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return LinearPlan(
        instance=Instance("wide/wide.cu", "exl3_linear_wide", macros),
        arguments=bytes(arguments),
        arguments_type=LinearArgs,
        offsets=shard_offsets(shards),
        grid=(blocks, row_tiles),
        threads=_THREADS,
        shared=fixed + groups * stages * stage,
        transform=TransformLaunch(TRANSFORM, (transform_blocks, rows), _TRANSFORM_THREADS),
        counters=0,
        scratch=scratch,
        scratch_parts=scratch_parts,
        out_features=totals.columns,
    )


@dataclass(slots=True)
class _Totals:
    """Sums over a launch's shards: k blocks, n tiles, bytes of activations a row tile, output columns."""

    k_blocks: int = 0
    n_tiles: int = 0
    activations: int = 0
    columns: int = 0


def _activation_bytes(rows: int) -> int:
    """Bytes of one k block's transformed activations."""
    return BLOCK_K * 2 * rows


def _place_shards(
    arguments: LinearArgs,
    shards: Sequence[Shard],
    kinds: Sequence[tuple[int, int]],
    row_tiles: int,
    tile_rows: int,
    n_tile: int,
) -> _Totals:
    """Fill in the shards' arguments; gives sums over them."""
    totals = _Totals()
    for index, shard in enumerate(shards):
        n_tiles, depth = -(-shard.out_features // n_tile), shard.in_features // BLOCK_K
        arguments.shards[index] = ShardArgs(
            in_features=shard.in_features,
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=totals.columns,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            half_bits=shard.half_bits,
            first_k_block=totals.k_blocks,
            first_n_tile=totals.n_tiles,
            activation_block=row_tiles * totals.activations // 16,
        )
        totals.k_blocks += n_tiles * depth
        totals.n_tiles += n_tiles
        totals.activations += depth * _activation_bytes(tile_rows)
        totals.columns += shard.crop_size
    return totals


def _splits_k(shards: Sequence[Shard], limits: GpuLimits) -> bool:
    """True where the wide kernel's pairs take turns at k: by (N, K) alone, since it decides the order of sums."""
    k_blocks = sum(-(-shard.out_features // (2 * BLOCK)) * (shard.in_features // BLOCK_K) for shard in shards)
    return k_blocks <= _SPLIT_K_BLOCKS * limits.multiprocessors
