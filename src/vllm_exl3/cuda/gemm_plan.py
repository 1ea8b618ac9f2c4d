"""Partitions one fused linear of up to 128 tokens into work for the GEMM kernel: instance, grid, shared memory,
scratch.

Arithmetic on shapes, without torch or a GPU; ``kernels/gemm/scheduler.cuh`` explains n tiles, k blocks and ranges.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import (
    MAX_SHARDS,
    ROW_PAD,
    Arithmetic,
    GpuLimits,
    check_shards,
    place_scratch,
    round_up,
    shard_offsets,
)
from vllm_exl3.cuda.prefill_arguments import PrefillArgs, place_shards
from vllm_exl3.cuda.prefill_input import MOST_FEW_IN, Input, plan_few_rows, plan_transform
from vllm_exl3.cuda.prefill_plan import GemmPlan
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK, Codebook

__all__ = [
    "FEW_TOKENS",
    "GEMM_TILES",
    "INT8_GEMM_TILES",
    "MOST_OF_TWO_KINDS",
    "GemmPartition",
    "choose_partition",
    "gemm_instance",
    "k_blocks",
    "plan_gemm",
    "refusal",
]

GEMM_TILES, INT8_GEMM_TILES = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128), (16, 24, 32, 48, 64, 96, 128)
"""Tokens that an instance of the kernel multiplies, with fp16 and with int8."""

_DEVICE = constants("gemm/gemm.cuh")
_BLOCK_N, _BLOCK_K, _K_TILES, _BARRIERS, _MOST_STAGES, _THREADS = (
    _DEVICE[f"GEMM_{name}"]
    for name in ("BLOCK_N", "BLOCK_K", "K_TILES", "BARRIER_BYTES", "MOST_STAGES", "BLOCK_THREADS")
)
_MOST_KINDS = 2
_MOST_SPLITS = 64
"""Splits of an n tile: more only add reading."""

_BESIDE = 1536
"""Bytes of shared memory left for a block of gemm/rotate.cu."""

MOST_OF_TWO_KINDS = 64
"""Tokens up to which registers hold what shards of two kinds need."""

_MOST_INT8_HALF_BITS = 8  # of ops/int8.py, which imports torch

FEW_TOKENS = 48
"""Tokens up to which a layer has one partition; more may have another. It decides the order of sums, so a row's bits
are the same in every batch on the same side of it."""


@dataclass(frozen=True, slots=True)
class _Costs:
    """Microseconds on an H200, for the times of seven layers of mul1 at K = 4 (docs/notes/kernels-gpu.md).

    Attributes:
        k_block: of 128 × 256 weights on a multiprocessor.
        split_end: of what follows the products of a range under split-K.
        stream_end: the same under stream-K.
        partial: of each range's partial sums of an n tile under stream-K.
    """

    k_block: float
    split_end: float
    stream_end: float
    partial: float


_FEW, _MANY = _Costs(0.93, 5.0, 7.6, 0.15), _Costs(1.25, 5.0, 11.0, 0.6)


@dataclass(frozen=True, slots=True)
class GemmPartition:
    """How the k blocks of a launch are divided among thread blocks.

    Attributes:
        blocks: thread blocks.
        split_k: split-K: every n tile is divided into equal splits of k, one a thread block. Else stream-K: the list of
            all k blocks is divided evenly.
    """

    blocks: int
    split_k: bool


@functools.lru_cache(maxsize=4096)
def choose_partition(n_tiles: int, depth: int, limits: GpuLimits, *, many: bool = False) -> GemmPartition:
    """The partition of least modelled time.

    Args:
        n_tiles: of all shards.
        depth: k blocks of an n tile.
        limits: the GPU.
        many: for more than `FEW_TOKENS` tokens, whose partial sums take longer to bring together.
    """
    costs = _MANY if many else _FEW
    blocks = min(limits.multiprocessors, n_tiles * depth)
    blocks = min(blocks, n_tiles * _MOST_SPLITS // 2)
    longest = -(-n_tiles * depth // blocks)
    stream_us = longest * costs.k_block + costs.stream_end + costs.partial * -(-depth // longest)
    choices = [(stream_us, GemmPartition(blocks, False))]
    for splits in range(1, min(limits.multiprocessors // n_tiles, depth, _MOST_SPLITS) + 1):
        if depth % splits == 0:
            choices.append((depth // splits * costs.k_block + costs.split_end, GemmPartition(n_tiles * splits, True)))
    return min(choices, key=lambda choice: choice[0])[1]


def refusal(shards: tuple[Shard, ...], limits: GpuLimits, *, int8: bool = False) -> str | None:
    """Why the kernel does not serve these shards on a GPU, or None."""
    if not limits.warpgroups:
        return f"{limits.architecture} has no wgmma"
    if len({shard.in_features for shard in shards}) != 1:
        return f"shards of {[shard.in_features for shard in shards]} inputs, expected one width"
    if int8 and any(shard.codebook != Codebook.MUL1 or shard.half_bits > _MOST_INT8_HALF_BITS for shard in shards):
        return f"only mul1 weights of at most {_MOST_INT8_HALF_BITS // 2} bits are multiplied as int8"
    if int8 and shards[0].in_features > MOST_FEW_IN:
        return f"{shards[0].in_features} inputs, expected at most {MOST_FEW_IN} where they are rounded to int8"
    if (kinds := len({(shard.half_bits, shard.codebook) for shard in shards})) > _MOST_KINDS:
        return f"shards of {kinds} kinds, expected at most {_MOST_KINDS}: registers hold no more"
    return None


def k_blocks(shards: tuple[Shard, ...]) -> int:
    """K blocks of a launch: 128 input channels × 256 output channels."""
    return sum(-(-shard.out_features // _BLOCK_N) * (shard.in_features // _BLOCK_K) for shard in shards)


def gemm_instance(tokens: int, kinds: Sequence[tuple[int, int]], *, int8: bool = False) -> Instance:
    """The kernel for ``tokens`` tokens and shards of (half_bits, codebook) pairs."""
    arithmetic = int(Arithmetic.BYTE if int8 else Arithmetic.HALF)
    listed = ", ".join(f"GemmKind<{half_bits}, {codebook}, {arithmetic}>" for half_bits, codebook in kinds)
    return Instance("gemm/gemm.cu", "exl3_gemm", (("INSTANCE_TOKENS", str(tokens)), ("INSTANCE_KINDS", listed)))


def _tile(rows: int, kinds: int, int8: bool) -> int:
    """The tile that holds ``rows`` tokens.

    Raises:
        ValueError: there is none.
    """
    tiles = INT8_GEMM_TILES if int8 else GEMM_TILES
    most = tiles[-1] if kinds == 1 else MOST_OF_TWO_KINDS
    if not 0 < rows <= most:
        raise ValueError(f"{rows} tokens of shards of {kinds} kinds, expected 1 to {most}")
    return next(tile for tile in tiles if rows <= tile)


def _check_partition(partition: GemmPartition, n_tiles: int, depth: int) -> None:
    """Refuse a division of work that the kernel's indexing does not allow.

    Raises:
        ValueError: blocks without k blocks, n tiles of unequal parts, or of more than `_MOST_SPLITS`.
    """
    splits, rest = divmod(partition.blocks, n_tiles)
    equal = rest == 0 and splits > 0 and depth % max(1, splits) == 0
    if not 0 < partition.blocks <= n_tiles * depth or (partition.split_k and not equal):
        raise ValueError(f"{partition} of {n_tiles} n tiles of {depth} k blocks")
    if -(-depth // (n_tiles * depth // partition.blocks)) + 1 > _MOST_SPLITS + 1:
        raise ValueError(
            f"{partition} of {n_tiles} n tiles of {depth} k blocks: expected at most {_MOST_SPLITS} parts of an n tile"
        )


def _staging(tokens: int) -> int:
    """Shared memory that the epilogue of a Hadamard block takes: ``gemm_staging_bytes`` of gemm/epilogue.cuh."""
    staged = tokens // 4 if tokens > 112 else tokens // 2 if tokens > 80 else tokens
    return BLOCK * 4 + 256 * 4 + BLOCK * 2 + 4 * staged * (BLOCK + 4)


@functools.lru_cache(maxsize=4096)
def plan_gemm(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    limits: GpuLimits,
    partition: GemmPartition | None = None,
    *,
    int8: bool = False,
    source: Input = Input.PLAIN,
) -> GemmPlan:
    """Cut one fused linear into a launch that rotates the input and one of the GEMM.

    Args:
        shards: at most `MAX_SHARDS`, of one ``in_features``.
        rows: tokens, at most the largest of `GEMM_TILES` or `INT8_GEMM_TILES`.
        in_width: columns of the input; up to ``in_features`` the rest counts as zero.
        limits: the GPU.
        partition: how to divide the work; None chooses by modelled time.
        int8: multiply int8, for shards that `prefill_int8.weights_refusal` does not refuse.
        source: what is rotated, for shards of at most `MOST_FEW_IN` inputs where it is not the input itself.

    Raises:
        ValueError: a shard breaks the layout's rules, `refusal` refuses them, or the GPU has too little shared memory.
    """
    check_shards(shards, in_width)
    if (reason := refusal(shards, limits, int8=int8)) is not None:
        raise ValueError(reason)
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    tokens = _tile(rows, len(kinds), int8)
    in_features = shards[0].in_features
    depth = in_features // _BLOCK_K
    arguments = PrefillArgs()
    place_shards(arguments, shards, kinds, _BLOCK_N, complements=not int8)
    partition = partition or choose_partition(arguments.n_tiles, depth, limits, many=rows > FEW_TOKENS)
    _check_partition(partition, arguments.n_tiles, depth)
    range_k_blocks, longer_ranges = divmod(arguments.n_tiles * depth, partition.blocks)

    transform = plan_few_rows(rows, in_features, len(shards), int8=int8, source=source)
    if transform is None and source != Input.PLAIN:
        raise ValueError(f"{in_features} inputs behind {source.name}, expected at most {MOST_FEW_IN}")
    offset_parts = transform.cluster if transform else depth
    transform = transform or plan_transform(rows, in_features, limits)  # refused for int8
    activation_bytes = tokens * _BLOCK_K * (1 if int8 else 2)
    weight_bytes = round_up(max(_K_TILES * (2 * 8 * 16 * half_bits + ROW_PAD) for half_bits, _ in kinds), 128)
    fixed = round_up(_BARRIERS + 4 * MAX_SHARDS * tokens + 2 * _staging(tokens), 128)
    stages = min(_MOST_STAGES, (limits.shared_memory - _BESIDE - fixed) // (weight_bytes + activation_bytes))
    if stages < 2:
        raise ValueError(f"{limits.shared_memory} bytes of shared memory hold no two k blocks of {kinds}")
    sizes = {
        "activations": len(shards) * depth * activation_bytes,
        "scales": 4 * len(shards) * rows,
        "offsets": 4 * len(shards) * rows * offset_parts,
        "arrivals": 4 * arguments.n_tiles,
        "partials": (1 if partition.split_k else 2) * partition.blocks * tokens * _BLOCK_N * 4,
    }
    scratch_parts, scratch = place_scratch(sizes)
    values = {
        "shard_count": len(shards), "rows": rows, "row_tiles": 1, "tile_rows": tokens, "in_width": in_width,
        "in_features": in_features, "group": 1, "whole_tiles": 0, "range_k_blocks": range_k_blocks,
        "longer_ranges": longer_ranges, "ranges": partition.blocks, "stages": stages, "weight_bytes": weight_bytes,
        "n_blocks": 1, "block_rows": transform.block_rows, "rows_in_shared": int(transform.shared > 0),
        "cluster_size": transform.cluster, "split_k": int(partition.split_k),
        "offset_parts": offset_parts,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return GemmPlan(
        instance=gemm_instance(tokens, kinds, int8=int8),
        arguments=bytes(arguments),
        offsets=shard_offsets(shards),
        grid=partition.blocks,
        threads=_THREADS,
        shared=fixed + stages * (weight_bytes + activation_bytes),
        cluster=1,
        transform=transform,
        rotation=None,
        finish=None,
        scratch=scratch,
        scratch_parts=scratch_parts,
    )
