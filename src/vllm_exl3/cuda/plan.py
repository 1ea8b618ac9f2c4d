"""Cuts one fused linear into a transform and a GEMM launch: kernel instance, grid, shared memory, scratch."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import (
    HALF_TILES,
    ROW_PAD,
    UNIT_IN,
    Arithmetic,
    Form,
    GpuLimits,
    LinearArgs,
    LinearPlan,
    activation_bytes,
    check_shards,
    place_shards,
    round_up,
)
from vllm_exl3.cuda.split import NARROW, WIDE, split
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK

__all__ = ["plan_linear"]

_HALVES = 2
_ALIGN = 256
_PLANES_ROTATIONS, _PLANES_UNITS, _PLANES_IDLE = 145.0, 64, 8
"""Up to how many 128-point transforms and units of work a block, and with how few idle multiprocessors, rotating in the
GEMM is faster than a launch before it: measured on an H200 (docs/kernels-gpu.md)."""

_WIDE_THREADS, _WIDE_STAGING, _WIDE_CHUNK, _OUTPUT_PITCH = 512, 512, 32, (BLOCK + 4) * 4
"""Of linear_wide.cuh: threads, bytes before the staging area, tokens staged at once, bytes of a staged token."""

_SPLIT_UNITS = 80
"""Units of two Hadamard blocks a block of the wide kernel up to which it splits k between its pairs instead."""


def _columns(arithmetic: Arithmetic, tile_rows: int) -> int:
    """Groups of 8 columns of the MMA's B operand."""
    return tile_rows // 4 if arithmetic is Arithmetic.INTEGER else max(1, tile_rows // 8)


def _epilogue_bytes(columns: int, tile_rows: int) -> int:
    """sizeof(Epilogue) in epilogue.cuh, rounded up to the barriers that follow it."""
    return round_up(8 * columns * 32 * 16 + tile_rows * (BLOCK + 4) * 4 + 2 * tile_rows * 4 + 4, 128)


def _slot_bytes(arithmetics: Sequence[Arithmetic], tile_rows: int, rows: int) -> int:
    """Bytes of one warp's sums: Cells in epilogue.cuh."""
    sizes = []
    for arithmetic in arithmetics:
        columns, tokens = _columns(arithmetic, tile_rows), 1 if arithmetic is Arithmetic.INTEGER else 2
        quads = 4 if columns > 1 or rows > 2 * tokens else 2 if rows > tokens else 1
        sizes.append(8 * columns * 8 * quads * 16)
    return max(sizes)


@dataclass(frozen=True, slots=True)
class _Memory:
    """How a block's shared memory is divided."""

    ring_units: int
    slots: int
    size: int


def _memory(limits: GpuLimits, warps: int, fixed: int, unit: int, slot: int) -> _Memory | None:
    """The largest rings that fit, at most 2 units a warp, then as many slots for the warps' sums."""
    for units in (2, 1):
        for slots in (warps, warps // 2):
            size = fixed + round_up(warps * units * _HALVES * 8, 128) + warps * units * unit + slots * slot
            if size <= limits.shared_memory:
                return _Memory(units, slots, size)
    return None


def _warps(limits: GpuLimits, form: Form, arithmetics: Sequence[Arithmetic], half_stride: int) -> int:
    """Warps of a block: the most that fit.

    They decide the order of fp32 sums, so they are chosen for the largest tile of the arithmetic class: a row's bits
    must not depend on how many rows come with it. Sums of integers have no order.
    """
    rows = form.tile_rows
    if set(arithmetics) != {Arithmetic.INTEGER}:
        rows = max(rows, 8 if form.identity else 16)
    columns = max(_columns(arithmetic, rows) for arithmetic in arithmetics)
    activations = max(activation_bytes(arithmetic, rows) for arithmetic in arithmetics)
    unit, slot = _HALVES * half_stride + activations, _slot_bytes(arithmetics, rows, rows)
    for warps in (16, 8, 4):
        if _memory(limits, warps, _epilogue_bytes(columns, rows), unit, slot):
            return warps
    raise ValueError(f"{limits.architecture}: {limits.shared_memory} bytes of shared memory are too few")


@dataclass(frozen=True, slots=True)
class _Planes:
    """Shared memory for activations that the GEMM rotates by itself (activations.cuh)."""

    units: int
    stride: int
    size: int


def _planes(shards: Sequence[Shard], form: Form, rows: int, range_units: int) -> _Planes:
    arithmetics = {form.arithmetic(shard.codebook) for shard in shards}
    units = min(range_units, max(shard.in_features for shard in shards) // UNIT_IN)
    # The remainder modulo 128 keeps two neighbouring rows of a 16-byte read in different banks.
    stride = 64 * round_up(units, 2) + 64 if arithmetics == {Arithmetic.INTEGER} else 128 * units + 16
    stored = rows * (2 if Arithmetic.INTEGER in arithmetics else 1)
    return _Planes(units, stride, round_up((form.tile_rows + rows * units) * 4, 128) + round_up(stored * stride, 128))


def _rotations(shards: Sequence[Shard], form: Form, rows: int, units: int) -> float:
    """128-point transforms that every block does when the GEMM rotates the input, in equivalents of a whole one."""
    shard = max(shards, key=lambda shard: shard.in_features)
    whole = shard.in_features // BLOCK
    # INTEGER transforms everything to find the largest value; the others only take the largest of x·suh.
    search = whole if form.arithmetic(shard.codebook) is Arithmetic.INTEGER else 0.3 * whole
    return rows * (search + min(whole, units / 2 + 1))


@functools.lru_cache(maxsize=4096)
def plan_linear(
    shards: tuple[Shard, ...], rows: int, in_width: int, form: Form, limits: GpuLimits, planes: bool | None = None
) -> LinearPlan:
    """Cut one fused linear into work for the kernels.

    Args:
        shards: at most `MAX_SHARDS`.
        rows: tokens.
        in_width: columns of the input; up to a shard's ``in_features`` the rest counts as zero.
        form: how to multiply.
        limits: the GPU.
        planes: whether the GEMM rotates the input by itself; None decides by its cost. It changes no bit.

    Raises:
        ValueError: a shard breaks the layout's rules, or nothing fits the GPU's shared memory.
    """
    check_shards(shards, in_width)
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    row_tiles = -(-rows // form.tile_rows)
    stored_rows = form.tile_rows if form.wide else min(rows, form.tile_rows)
    arguments = LinearArgs()
    split_k = form.wide and _splits_k(shards, limits)
    strip = 2 * BLOCK if form.wide and not split_k else BLOCK
    totals, offsets = place_shards(arguments, shards, kinds, form, row_tiles, stored_rows, rows, strip)
    blocks, cluster = split(
        totals.strips,
        frozenset(shard.in_features // UNIT_IN for shard in shards),
        limits,
        WIDE if form.wide and not split_k else NARROW,
    )
    if form.wide:
        cluster = 1
    range_units, longer_ranges = divmod(totals.units, blocks)
    half_stride = max(4 * (HALF_TILES * 16 * half_bits + ROW_PAD) for half_bits, _ in kinds)

    launch = (
        _wide(form, kinds, half_stride, split_k, limits)
        if form.wide
        else _narrow(form, kinds, shards, rows, half_stride, blocks, range_units + (longer_ranges > 0), limits, planes)
    )
    parts = max(1, min(max(shard.in_features for shard in shards) // BLOCK // 4, 16, limits.multiprocessors // rows))
    counters = totals.strips * row_tiles
    sizes = {"partials": row_tiles * 2 * blocks * launch.partial_stride * 16}
    if not launch.planes:
        sizes |= {
            "activations": row_tiles * totals.activations,
            "scales": 4 * len(shards) * rows,
            "sums": 4 * rows * totals.depth,
            "counters": 4 * counters,
        }
    scratch_parts, scratch = {}, 0
    for name, size in sizes.items():
        scratch_parts[name] = scratch
        scratch += round_up(size, _ALIGN)

    values = {
        "shard_count": len(shards), "rows": rows, "row_tiles": row_tiles, "tile_rows": form.tile_rows,
        "stored_rows": stored_rows, "in_width": in_width, "parts": parts, "range_units": range_units,
        "longer_ranges": longer_ranges, "total_strips": totals.strips, "partial_stride": launch.partial_stride,
        "half_stride": half_stride, "cluster": cluster, "strip_tiles": strip // 16, **launch.arguments,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return LinearPlan(
        instance=launch.instance,
        arguments=bytes(arguments),
        offsets=offsets,
        grid=(blocks, row_tiles),
        threads=launch.threads,
        shared=launch.shared,
        cluster=cluster,
        transform_grid=None if launch.planes else (parts, rows),
        counters=counters,
        scratch=scratch,
        scratch_parts=scratch_parts,
        out_features=totals.columns,
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    """What depends on the kernel: its instance, block, shared memory, and the arguments that describe them."""

    instance: Instance
    threads: int
    shared: int
    partial_stride: int
    planes: bool
    arguments: dict[str, int]


def _narrow(
    form: Form,
    kinds: Sequence[tuple[int, int]],
    shards: Sequence[Shard],
    rows: int,
    half_stride: int,
    blocks: int,
    range_units: int,
    limits: GpuLimits,
    planes: bool | None,
) -> _Launch:
    """linear.cu: up to 16 tokens a tile."""
    arithmetics = [form.arithmetic(codebook) for _, codebook in kinds]
    columns = max(_columns(arithmetic, form.tile_rows) for arithmetic in arithmetics)
    stored_rows, one_tile = min(rows, form.tile_rows), rows <= form.tile_rows
    warps = _warps(limits, form, arithmetics, half_stride)
    fixed, slot = _epilogue_bytes(columns, form.tile_rows), _slot_bytes(arithmetics, form.tile_rows, stored_rows)

    plane = _planes(shards, form, stored_rows, range_units)
    memory = _memory(limits, warps, fixed + plane.size, _HALVES * half_stride, slot)
    if planes is None:
        planes = (
            limits.warpgroups  # what the numbers were measured on
            and _rotations(shards, form, rows, plane.units) <= _PLANES_ROTATIONS
            and range_units <= _PLANES_UNITS
            and blocks > limits.multiprocessors - _PLANES_IDLE
        )
    planes = planes and one_tile and form.tile_rows <= 8 and memory is not None
    activation_stride = 0
    if not planes:
        activation_stride = max(round_up(activation_bytes(arithmetic, stored_rows), 128) for arithmetic in arithmetics)
        memory = _memory(limits, warps, fixed, _HALVES * half_stride + activation_stride, slot)
    assert memory is not None  # _warps saw to it
    macros = (
        ("INSTANCE_PLANES", str(int(planes))),
        ("INSTANCE_TILE_ROWS", str(form.tile_rows)),
        ("INSTANCE_WARPS", str(warps)),
        ("INSTANCE_KINDS", form.kinds(kinds)),
    )
    arguments = {
        "ring_units": memory.ring_units, "activation_stride": activation_stride, "plane_stride": plane.stride,
        "plane_units": plane.units, "reduction_slots": memory.slots, "slot_bytes": slot,
    }  # fmt: skip
    instance = Instance("linear.cu", "exl3_linear", macros)
    return _Launch(instance, 32 * warps, memory.size, 8 * columns * 32, planes, arguments)


def _splits_k(shards: Sequence[Shard], limits: GpuLimits) -> bool:
    """Whether the wide kernel's pairs take turns at k: it depends on (N, K) alone, as it decides the order of sums."""
    units = sum(-(-shard.out_features // (2 * BLOCK)) * (shard.in_features // UNIT_IN) for shard in shards)
    return units <= _SPLIT_UNITS * limits.multiprocessors


def _wide(form: Form, kinds: Sequence[tuple[int, int]], half_stride: int, split_k: bool, limits: GpuLimits) -> _Launch:
    """linear_wide.cu: 32, 64 or 128 tokens a tile."""
    if not limits.warpgroups:
        raise ValueError(f"{limits.architecture} has no wgmma, which {form.name} needs")
    activation_stride = activation_bytes(Arithmetic.HALF, form.tile_rows)
    groups, staged = (2, form.tile_rows) if split_k else (1, 2 * _WIDE_CHUNK)
    fixed, stage = _WIDE_STAGING + staged * _OUTPUT_PITCH, 4 // groups * half_stride + activation_stride
    stages = min(8, (limits.shared_memory - fixed) // (groups * stage))
    macros = (
        ("INSTANCE_TILE_ROWS", str(form.tile_rows)),
        ("INSTANCE_SPLIT_K", str(int(split_k))),
        ("INSTANCE_KINDS", form.kinds(kinds)),
    )
    instance = Instance("linear_wide.cu", "exl3_linear_wide", macros)
    arguments = {"ring_units": stages, "activation_stride": activation_stride}
    partial_stride = form.tile_rows // 8 // groups * _WIDE_THREADS
    return _Launch(instance, _WIDE_THREADS, fixed + groups * stages * stage, partial_stride, False, arguments)
