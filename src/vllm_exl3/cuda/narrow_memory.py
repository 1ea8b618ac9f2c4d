"""Shared memory of the narrow kernel: pipelines of weights, activations, sums on their way in a cluster.

The sizes are those of ``kernels/narrow_record.cuh``, ``narrow/pipeline.cuh`` and ``narrow/partials.cuh``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import ROW_PAD, Arithmetic, Form, GpuLimits
from vllm_exl3.cuda.narrow_partition import NarrowPartition, clustered
from vllm_exl3.pack.stored import BLOCK, Codebook

__all__ = ["NARROW", "NarrowMemory", "memory_of", "most_columns", "pipeline_stages", "record_bytes", "stage_bytes"]

NARROW = 16
"""Tokens that decoding to fp16 serves at most in a tile, other than in `narrow.NARROW_32`."""

_DEVICE = constants("narrow/arguments.cuh")
_WARPS, _K_TILES, _STATIC_BYTES = _DEVICE["WARPS"], _DEVICE["K_TILES"], 128
_STAGES, _LEAST_CACHED = (2, 3, 4, 6, 8), 4
_IN_FLIGHT = 96 << 10
"""Bytes a multiprocessor that cover the latency of DRAM, with room to spare."""

_TWO_DECODED, _TWO_DECODED_ALONE = (2, 4, 6, 8), (10, 12)
"""2·K for which a warp that decodes mul1 to fp16 may have two tile columns without running out of registers; and those
for which it may where all of a launch's shards are alike."""

_TOKEN_BYTES = {Arithmetic.INTEGER: 1056, Arithmetic.PAIR: 576, Arithmetic.HALF: 320, Arithmetic.BYTE: 576}
"""``Record::token_bytes`` of narrow/record.cuh, but for wgmma's operands."""

Kinds = Sequence[tuple[int, int]]
"""(half_bits, codebook) of a launch's shards."""


@dataclass(frozen=True, slots=True)
class NarrowMemory:
    """Shared memory of a launch.

    Attributes:
        stages: k blocks of a warp's pipeline.
        cached: k blocks whose activations are cached at once.
        buffers: of cached activations: two where the next ones are fetched meanwhile.
        record: bytes of a k block's activations.
        shared: dynamic shared memory in bytes.
    """

    stages: int
    cached: int
    buffers: int
    record: int
    shared: int


def record_bytes(arithmetic: Arithmetic, tile_rows: int, tokens: int, limits: GpuLimits) -> int:
    """Bytes of a k block's activations for so many tokens of a tile."""
    if limits.warpgroups and arithmetic is Arithmetic.HALF:
        return 2 * (8 * (16 * tile_rows + 16) + 32) + 8 * tile_rows
    group = 4 if arithmetic is Arithmetic.INTEGER else 8
    return (tile_rows if tile_rows > group else tokens) * _TOKEN_BYTES[arithmetic]


def stage_bytes(half_bits: int, columns: int) -> int:
    """Bytes of a k block's weights in a warp's pipeline."""
    return _K_TILES * (16 * columns * half_bits + ROW_PAD)


def _largest_record(form: Form, kinds: Kinds, tile_rows: int, tokens: int, limits: GpuLimits) -> int:
    return max(record_bytes(form.arithmetic(codebook), tile_rows, tokens, limits) for _, codebook in kinds)


def _largest_stage(kinds: Kinds, columns: int) -> int:
    return max(stage_bytes(half_bits, columns) for half_bits, _ in kinds)


def most_columns(form: Form, kinds: Kinds, limits: GpuLimits) -> int:
    """Tile columns a warp may have: sums must fit the registers, three k blocks of its pipeline and some records the
    memory.

    The same for every tile of an arithmetic class, since columns decide the order of sums; `narrow.NARROW_32`, which is
    not used where all tokens are to have one class, is a class of its own.
    """
    if form.narrow:
        return 1
    two = _TWO_DECODED + _TWO_DECODED_ALONE if len(set(kinds)) == 1 else _TWO_DECODED
    two_fit = limits.warpgroups and all(bits in two and book == Codebook.MUL1 for bits, book in kinds)
    if not form.identity and not two_fit:  # measured: more are no faster, and leave no register to spare
        return 1
    tokens, count = (8, 2) if form.identity else (NARROW, 6)
    records = count * _largest_record(form, kinds, tokens, tokens, limits)
    return 2 if 3 * _WARPS * _largest_stage(kinds, 2) + records <= limits.shared_memory else 1


def _exchange_bytes(partition: NarrowPartition, tokens: int, limits: GpuLimits) -> int:
    """Bytes that a cluster's blocks send to the one that finishes a token's Hadamard block."""
    if not clustered(partition, limits):
        return 0
    finishing = 1 << partition.splits.bit_length() - 1
    return -(-tokens * 2 * partition.columns // finishing) * partition.splits * 4 * BLOCK


def pipeline_stages(form: Form, kinds: Kinds, limits: GpuLimits, partition: NarrowPartition) -> int:
    """K blocks of a warp's pipeline: it is part of the kernel, and the same for layers of any depth and batches of any
    size.

    The smallest that keeps enough bytes in flight, or else the largest that fits beside a few records.
    """
    stages_bytes = _WARPS * _largest_stage(kinds, partition.columns)
    cached = _LEAST_CACHED * _largest_record(form, kinds, form.tile_rows, form.tile_rows, limits)
    room = limits.shared_memory - _STATIC_BYTES - _exchange_bytes(partition, form.tile_rows, limits) - cached
    fitting = [stages for stages in _STAGES if stages * stages_bytes <= room] or [_STAGES[0]]
    return next((stages for stages in fitting if (stages - 1) * stages_bytes >= _IN_FLIGHT), fitting[-1])


def memory_of(
    form: Form, kinds: Kinds, limits: GpuLimits, partition: NarrowPartition, tokens: int, longest: int, rotated: bool
) -> NarrowMemory:
    """Lay out a launch's shared memory.

    Args:
        form: how to multiply.
        kinds: of the shards.
        limits: the GPU.
        partition: how work is divided.
        tokens: of a tile.
        longest: k blocks of the longest range.
        rotated: whether a launch before it rotates, so that activations can be fetched while others are multiplied.

    Raises:
        ValueError: the GPU has too little.
    """
    stages = pipeline_stages(form, kinds, limits, partition)
    record = _largest_record(form, kinds, form.tile_rows, tokens, limits)
    fixed = _WARPS * stages * _largest_stage(kinds, partition.columns) + _exchange_bytes(
        partition, form.tile_rows, limits
    )
    cached = max(1, min(longest, (limits.shared_memory - _STATIC_BYTES - fixed) // record))
    buffers = 2 if rotated and cached < longest and cached // 2 >= stages else 1
    shared = fixed + cached // buffers * buffers * record
    if shared + _STATIC_BYTES > limits.shared_memory:
        needed = shared + _STATIC_BYTES
        raise ValueError(f"{limits.architecture}: {limits.shared_memory} bytes of shared memory, {needed} are needed")
    return NarrowMemory(stages, cached // buffers, buffers, record, shared)
