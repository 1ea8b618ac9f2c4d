"""Partitions one fused linear with many tokens into work for the prefill kernel: instance, grid, shared memory,
scratch.

Arithmetic on shapes, without torch or a GPU; ``kernels/prefill_problem.cuh`` explains tiles, n tiles, k blocks and
ranges.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import (
    BLOCK_K,
    ROW_PAD,
    GpuLimits,
    ShardOffsets,
    check_shards,
    place_scratch,
    round_up,
    shard_offsets,
)
from vllm_exl3.cuda.prefill_arguments import PrefillArgs, PrefillShard, place_shards
from vllm_exl3.cuda.prefill_input import InputLaunch, plan_quantize, plan_rotate, plan_transform
from vllm_exl3.cuda.prefill_partition import PrefillPartition, choose_partition
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = [
    "FINISH",
    "FINISH_SHARED",
    "INT8_FINISH",
    "MMA_TILES",
    "TILES",
    "GemmPlan",
    "PrefillArgs",
    "PrefillPartition",
    "PrefillShard",
    "choose_partition",
    "choose_tile",
    "kernel",
    "plan_prefill",
]

TILES = (64, 128, 192, 256)
"""Tokens of a tile that kernels with wgmma exist for."""

MMA_TILES = (64, 128)
"""The same without wgmma."""

INT8_TILES = (192, 256)
"""The same for int8: fewer tokens leave the tensor cores waiting for weights to be decoded."""

FINISH, INT8_FINISH = (
    Instance("prefill/reduce.cu", "exl3_prefill_finish", (("INSTANCE_PARTIALS", parts),))
    for parts in ("HalfPartials", "IntPartials")
)
"""The kernels that reduce split tiles: of fp16 products, and of int8 ones."""

_DEVICE = constants("prefill/shape.cuh")
_PAIR_THREADS, _BARRIERS = _DEVICE["PAIR_THREADS"], _DEVICE["BARRIER_BYTES"]
_INT8_PITCH = 2 * BLOCK + 16  # of prefill/epilogue_int8.cuh
_FINISHED_TOKENS = 64  # of a block of prefill/reduce.cu
_SUM_BYTES, _INT8_SUM_BYTES = 2, 4  # of a partial sum: prefill/partials.cuh
_ACTIVATIONS_IN_L2 = 24 << 20
_RESERVED = 1024  # bytes of shared memory that every block takes besides


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The launches of one linear, all but the pointers.

    Attributes:
        instance: the GEMM kernel.
        arguments: template of the launch arguments; pointers are zero, and shard pointers hold nothing.
        offsets: where each shard's tensors begin.
        grid: thread blocks of the GEMM.
        threads: threads a block of the GEMM.
        shared: its dynamic shared memory in bytes.
        cluster: blocks of a thread block cluster.
        transform: the launch of the kernel that rotates inputs.
        rotation: the same on tensor cores, for 16-bit inputs in aligned vectors; None where there is none.
        finish: blocks in x and y of the kernel that reduces split tiles; None where none is split, or the GEMM does it.
        scratch: bytes of scratch.
        scratch_parts: where its parts begin.
    """

    instance: Instance
    arguments: bytes
    offsets: tuple[ShardOffsets, ...]
    grid: int
    threads: int
    shared: int
    cluster: int
    transform: InputLaunch
    rotation: InputLaunch | None
    finish: tuple[int, int] | None
    scratch: int
    scratch_parts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One of the two kernels with one tile.

    Attributes:
        source: its entry is ``exl3_`` and this, its file ends so.
        n_blocks: Hadamard blocks of an n tile.
        pairs: of them, those of one thread block; the others are in other blocks of its cluster.
        producers: threads that copy and do not multiply.
        stages: k blocks that the ring holds at most.
        resident: thread blocks on a multiprocessor.
    """

    source: str
    n_blocks: int
    pairs: int
    producers: int
    stages: int
    resident: int

    @property
    def reduces(self) -> bool:
        """True where it reduces split tiles itself: prefill/reduction.cuh."""
        return self.pairs > 1

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.n_blocks // self.pairs

    def clusters(self, limits: GpuLimits) -> int:
        """How many clusters run at once.

        Raises:
            ValueError: none does.
        """
        if self.cluster == 1:
            return limits.multiprocessors * self.resident
        most = dict(limits.clusters).get(self.cluster, 0) or limits.multiprocessors // self.cluster
        if most == 0:
            raise ValueError(
                f"a GPU of {limits.multiprocessors} multiprocessor, expected {self.cluster} or more: as many share a "
                f"tile in the prefill kernels of {limits.architecture}. Serve on a GPU, or a part of one, that has them"
            )
        return most


def _staging(tokens: int) -> int:
    """Shared memory that the epilogue of a Hadamard block takes: prefill/shape.cuh, prefill/epilogue_mma.cuh."""
    outputs = 64 * 64 * 2 + (tokens + 1) * BLOCK * 2 if tokens > 128 else 64 * (BLOCK + 4) * 4
    return BLOCK * 4 + 256 * 4 + BLOCK * 2 + outputs


FINISH_SHARED = _staging(_FINISHED_TOKENS)
"""Dynamic shared memory of `FINISH` in bytes."""


def kernel(tokens: int, limits: GpuLimits) -> _Kernel:
    """The kernel for tiles of ``tokens`` on a GPU: with wgmma, or with mma.sync."""
    if not limits.warpgroups:
        return _Kernel("prefill_mma", 1, 1, 0, 4, 2 if tokens <= 64 and limits.shared_memory > _TWO_BLOCKS else 1)
    return _Kernel("prefill", 2, 2 if tokens <= 128 else 1, 128, 12, 1)


_TWO_BLOCKS = 160000
"""Shared memory of a multiprocessor from which on two blocks of the kernel with mma.sync fit."""


def choose_tile(rows: int, n_tiles: int, depth: int, limits: GpuLimits, *, int8: bool = False) -> int:
    """The tile that is estimated to take the least time."""

    def cost(tokens: int) -> float:
        tiles = n_tiles * -(-rows // tokens)
        used = kernel(tokens, limits)
        return choose_partition(tiles, depth, tokens, used.clusters(limits), int8=int8, reduces=used.reduces).cost

    tiles = INT8_TILES if int8 else TILES if limits.warpgroups else MMA_TILES
    return min((tokens for tokens in tiles if tokens < max(2 * rows, tiles[0] + 1)), key=cost)


def prefill_instance(source: str, tokens: int, kinds: Sequence[tuple[int, int]]) -> Instance:
    """The GEMM for (half_bits, codebook) pairs."""
    listed = ", ".join(f"PrefillKind<{half_bits}, {codebook}>" for half_bits, codebook in kinds)
    file = source.removeprefix("prefill_")
    return Instance(
        f"prefill/{file}.cu", f"exl3_{source}", (("INSTANCE_TOKENS", str(tokens)), ("INSTANCE_KINDS", listed))
    )


@functools.lru_cache(maxsize=4096)
def plan_prefill(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    limits: GpuLimits,
    tokens: int | None = None,
    ranges: int | None = None,
    *,
    int8: bool = False,
) -> GemmPlan:
    """Cut one fused linear into work for the prefill kernels.

    Args:
        shards: at most `MAX_SHARDS`, of one ``in_features``.
        rows: tokens.
        in_width: columns of the input; up to ``in_features`` the rest counts as zero.
        limits: the GPU.
        tokens: tokens of a tile, one of `TILES`; None chooses by cost.
        ranges: ranges that the tiles beyond full rounds are split into; None chooses by cost.
        int8: for the kernel that multiplies int8, whose activations take half the bytes.

    Raises:
        ValueError: a shard breaks the layout's rules, widths differ, or the GPU holds no cluster of the kernels.
    """
    check_shards(shards, in_width)
    if len({shard.in_features for shard in shards}) != 1:
        raise ValueError(f"shards of {[shard.in_features for shard in shards]} inputs, expected one width")
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    depth = shards[0].in_features // BLOCK_K
    arguments = PrefillArgs()
    place_shards(arguments, shards, kinds, kernel(64, limits).n_blocks * BLOCK)
    tokens = tokens or choose_tile(rows, arguments.n_tiles, depth, limits, int8=int8)
    chosen_kernel = kernel(tokens, limits)
    row_tiles = -(-rows // tokens)
    clusters, tiles = chosen_kernel.clusters(limits), arguments.n_tiles * row_tiles
    chosen = choose_partition(tiles, depth, tokens, clusters, int8=int8, reduces=chosen_kernel.reduces)
    if ranges is not None:
        whole = tiles if ranges == 0 else tiles - tiles % clusters
        chosen = PrefillPartition(
            min(clusters, max(whole, ranges)), whole, ranges, chosen.cost, chosen_kernel.reduces and ranges > 0
        )
    range_k_blocks, longer_ranges = (
        divmod((tiles - chosen.whole_tiles) * depth, chosen.ranges) if chosen.ranges else (0, 0)
    )

    finish = (tiles - chosen.whole_tiles) * chosen_kernel.n_blocks, -(-tokens // _FINISHED_TOKENS)
    in_features = shards[0].in_features
    transform = plan_quantize(rows, in_features, len(shards)) if int8 else plan_transform(rows, in_features, limits)
    rotation = plan_rotate(rows, in_features, limits, len(shards)) if limits.warpgroups and not int8 else None
    pairs = chosen_kernel.pairs
    activation_bytes = tokens * BLOCK_K * (1 if int8 else 2)
    weight_bytes = round_up(max(4 * (pairs * 8 * 16 * half_bits + ROW_PAD) for half_bits, _ in kinds), 128)
    fixed = _BARRIERS + (tokens * _INT8_PITCH if int8 else pairs * _staging(tokens))
    room = limits.shared_memory // chosen_kernel.resident - _RESERVED * (chosen_kernel.resident - 1)
    stages = min(chosen_kernel.stages, (room - fixed) // (weight_bytes + activation_bytes))
    group = max(1, _ACTIVATIONS_IN_L2 // (depth * activation_bytes))
    sizes = {
        "activations": len(shards) * row_tiles * depth * activation_bytes,
        "scales": 4 * len(shards) * rows,
        "partials": 2
        * chosen.ranges
        * chosen_kernel.n_blocks
        * tokens
        * BLOCK
        * (_INT8_SUM_BYTES if int8 else _SUM_BYTES),
    }
    if chosen.reduces:
        sizes["arrivals"] = 4 * (tiles - chosen.whole_tiles) * chosen_kernel.n_blocks
    scratch_parts, scratch = place_scratch(sizes)
    values = {
        "shard_count": len(shards), "rows": rows, "row_tiles": row_tiles, "tile_rows": tokens, "in_width": in_width,
        "in_features": in_features, "group": min(group, row_tiles), "whole_tiles": chosen.whole_tiles,
        "range_k_blocks": range_k_blocks, "longer_ranges": longer_ranges, "ranges": chosen.ranges, "stages": stages,
        "weight_bytes": weight_bytes, "n_blocks": chosen_kernel.n_blocks,
        "block_rows": transform.block_rows, "rows_in_shared": int(transform.shared > 0),
        "cluster_size": rotation.cluster if rotation else 0,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return GemmPlan(
        instance=prefill_instance(chosen_kernel.source + "_int8" * int8, tokens, kinds),
        arguments=bytes(arguments),
        offsets=shard_offsets(shards),
        grid=chosen.clusters * chosen_kernel.cluster,
        threads=chosen_kernel.producers + pairs * _PAIR_THREADS,
        shared=fixed + stages * (weight_bytes + activation_bytes),
        cluster=chosen_kernel.cluster,
        transform=transform,
        rotation=rotation,
        finish=finish if chosen.ranges and not chosen.reduces else None,
        scratch=scratch,
        scratch_parts=scratch_parts,
    )
