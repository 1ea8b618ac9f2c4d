"""What shared memory holds in the narrow kernel: rings of weights, activations, sums on their way in a cluster.

The sizes are those of ``kernels/narrow_record.cuh``, ``narrow_ring.cuh`` and ``narrow_finish.cuh``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.geometry import ROW_PAD, Arithmetic, Form, GpuLimits
from vllm_exl3.cuda.narrow_cut import Cut, clustered
from vllm_exl3.pack.stored import BLOCK, Codebook

__all__ = ["NARROW", "NarrowMemory", "memory_of", "most_columns", "record_bytes", "ring_items", "slot_bytes"]

NARROW = 16
"""Tokens that decoding to fp16 serves at most in a tile, other than in `narrow.MANY`."""

_WARPS, _ITEM_TILES, _STATIC_BYTES = 16, 8, 128
_RINGS, _LEAST_KEPT = (2, 3, 4, 6, 8), 4
_IN_FLIGHT = 96 << 10
"""Bytes a multiprocessor that cover the latency of DRAM, with room to spare."""

_TWO_DECODED, _TWO_DECODED_ALONE = (2, 4, 6, 8), (10, 12)
"""2·K for which a warp that decodes mul1 to fp16 may have two tile columns without running out of registers; and those
for which it may where all of a launch's shards are alike."""

_TOKEN_BYTES = {Arithmetic.INTEGER: 1056, Arithmetic.PAIR: 576, Arithmetic.HALF: 320, Arithmetic.BYTE: 576}
"""``Record::token_bytes`` of narrow_record.cuh, but for wgmma's operands."""

Kinds = Sequence[tuple[int, int]]
"""(half_bits, codebook) of a launch's shards."""


@dataclass(frozen=True, slots=True)
class NarrowMemory:
    """Shared memory of a launch.

    Attributes:
        ring: items of a warp's ring.
        kept: items whose activations are kept at once.
        halves: how often that is there: twice where the next ones are fetched meanwhile.
        record: bytes of an item's activations.
        shared: dynamic shared memory in bytes.
    """

    ring: int
    kept: int
    halves: int
    record: int
    shared: int


def record_bytes(arithmetic: Arithmetic, tile_rows: int, tokens: int, limits: GpuLimits) -> int:
    """Bytes of an item's activations for so many tokens of a tile."""
    if limits.warpgroups and arithmetic is Arithmetic.HALF:
        return 2 * (8 * (16 * tile_rows + 16) + 32) + 8 * tile_rows
    group = 4 if arithmetic is Arithmetic.INTEGER else 8
    return (tile_rows if tile_rows > group else tokens) * _TOKEN_BYTES[arithmetic]


def slot_bytes(half_bits: int, columns: int) -> int:
    """Bytes of an item's weights in a warp's ring."""
    return _ITEM_TILES * (16 * columns * half_bits + ROW_PAD)


def _largest_record(form: Form, kinds: Kinds, tile_rows: int, tokens: int, limits: GpuLimits) -> int:
    return max(record_bytes(form.arithmetic(codebook), tile_rows, tokens, limits) for _, codebook in kinds)


def _largest_slot(kinds: Kinds, columns: int) -> int:
    return max(slot_bytes(half_bits, columns) for half_bits, _ in kinds)


def most_columns(form: Form, kinds: Kinds, limits: GpuLimits) -> int:
    """Tile columns a warp may have: sums must fit the registers, three items of its ring and some records the memory.

    The same for every tile of an arithmetic class, since columns decide the order of sums; `narrow.MANY`, which is not
    used where all tokens are to have one class, is a class of its own.
    """
    if form.narrow:
        return 1
    two = _TWO_DECODED + _TWO_DECODED_ALONE if len(set(kinds)) == 1 else _TWO_DECODED
    two_fit = limits.warpgroups and all(bits in two and book == Codebook.MUL1 for bits, book in kinds)
    if not form.identity and not two_fit:  # measured: more are no faster, and leave no register to spare
        return 1
    tokens, count = (8, 2) if form.identity else (NARROW, 6)
    records = count * _largest_record(form, kinds, tokens, tokens, limits)
    return 2 if 3 * _WARPS * _largest_slot(kinds, 2) + records <= limits.shared_memory else 1


def _exchange_bytes(cut: Cut, tokens: int, limits: GpuLimits) -> int:
    """What a cluster's blocks send to the one that finishes a token's Hadamard block."""
    if not clustered(cut, limits):
        return 0
    finishing = 1 << cut.parts.bit_length() - 1
    return -(-tokens * 2 * cut.columns // finishing) * cut.parts * 4 * BLOCK


def ring_items(form: Form, kinds: Kinds, limits: GpuLimits, cut: Cut) -> int:
    """Items of a warp's ring: it is part of the kernel, and the same for layers of any depth and batches of any size.

    The smallest that keeps enough bytes in flight, or else the largest that fits beside a few records.
    """
    slots = _WARPS * _largest_slot(kinds, cut.columns)
    kept = _LEAST_KEPT * _largest_record(form, kinds, form.tile_rows, form.tile_rows, limits)
    room = limits.shared_memory - _STATIC_BYTES - _exchange_bytes(cut, form.tile_rows, limits) - kept
    fitting = [ring for ring in _RINGS if ring * slots <= room] or [_RINGS[0]]
    return next((ring for ring in fitting if (ring - 1) * slots >= _IN_FLIGHT), fitting[-1])


def memory_of(
    form: Form, kinds: Kinds, limits: GpuLimits, cut: Cut, tokens: int, longest: int, rotated: bool
) -> NarrowMemory:
    """Lay out a launch's shared memory.

    Args:
        form: how to multiply.
        kinds: of the shards.
        limits: the GPU.
        cut: how work is divided.
        tokens: of a tile.
        longest: items of the longest range.
        rotated: whether a launch before it rotates, so that activations can be fetched while others are multiplied.

    Raises:
        ValueError: the GPU has too little.
    """
    ring = ring_items(form, kinds, limits, cut)
    record = _largest_record(form, kinds, form.tile_rows, tokens, limits)
    fixed = _WARPS * ring * _largest_slot(kinds, cut.columns) + _exchange_bytes(cut, form.tile_rows, limits)
    kept = max(1, min(longest, (limits.shared_memory - _STATIC_BYTES - fixed) // record))
    halves = 2 if rotated and kept < longest and kept // 2 >= ring else 1
    shared = fixed + kept // halves * halves * record
    if shared + _STATIC_BYTES > limits.shared_memory:
        needed = shared + _STATIC_BYTES
        raise ValueError(f"{limits.architecture}: {limits.shared_memory} bytes of shared memory, {needed} are needed")
    return NarrowMemory(ring, kept // halves, halves, record, shared)
