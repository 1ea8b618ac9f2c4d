"""How one fused linear is laid out for the kernels: launch arguments, work units, scratch, shared memory.

Everything here is arithmetic on shapes, without torch or a GPU, and mirrors ``kernels/problem.cuh`` field by field.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK, Codebook

__all__ = [
    "MAX_SHARDS",
    "Arithmetic",
    "Form",
    "GpuLimits",
    "LinearArgs",
    "LinearPlan",
    "ShardArgs",
    "linear_instance",
    "plan_linear",
]

MAX_SHARDS = 8
"""Shards that one launch serves."""

_UNIT_IN = 64
_HALVES = 2
_HALF_TILES = 4
_ROW_PAD = 32
_ALIGN = 256
_PLANES_LIMIT = 400.0
"""128-point transforms a block up to which rotating in the GEMM is faster than a launch before it."""


class Arithmetic(IntEnum):
    """What a weight is to the tensor core; ``kernels/codebook.cuh`` explains each."""

    INTEGER = 0
    PAIR = 1
    HALF = 2


@dataclass(frozen=True, slots=True)
class Form:
    """One arithmetic class of a launch.

    Attributes:
        identity: use the codebook's identity (mul1 by bytes, mcg and 3INST by halves) instead of decoding to fp16.
        tile_rows: tokens that share one decoding of the weights.
    """

    identity: bool
    tile_rows: int

    def arithmetic(self, codebook: int) -> Arithmetic:
        """How a shard of this codebook is multiplied."""
        if not self.identity:
            return Arithmetic.HALF
        return Arithmetic.INTEGER if codebook == Codebook.MUL1 else Arithmetic.PAIR


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What a plan needs to know of a GPU.

    Attributes:
        architecture: NVRTC's name, such as ``sm_90a``.
        multiprocessors: their number.
        shared_memory: bytes that one block may use.
    """

    architecture: str
    multiprocessors: int
    shared_memory: int

    @property
    def dependent_launch(self) -> bool:
        """Whether kernels may start before the one ahead has finished (sm_90 and later)."""
        return int("".join(filter(str.isdigit, self.architecture))) >= 90


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class ShardArgs(ctypes.Structure):
    """``ShardArgs`` of problem.cuh."""

    __slots__ = ()
    _fields_ = (
        *_fields(ctypes.c_uint64, "trellis", "suh", "svh"),
        *_fields(ctypes.c_uint32, "in_features", "out_features", "crop_start", "crop_size", "out_column", "kind"),
        *_fields(ctypes.c_uint32, "half_bits", "arithmetic", "first_unit", "first_strip", "activation_block", "sum_block"),
    )


class LinearArgs(ctypes.Structure):
    """``LinearArgs`` of problem.cuh."""

    __slots__ = ()
    _fields_ = (
        ("shards", ShardArgs * MAX_SHARDS),
        *_fields(ctypes.c_uint64, "x", "out", "bias", "activations", "scales", "sums", "counters", "partials"),
        *_fields(ctypes.c_int64, "x_stride", "out_stride"),
        *_fields(ctypes.c_uint32, "shard_count", "rows", "row_tiles", "tile_rows", "stored_rows", "in_width"),
        *_fields(ctypes.c_uint32, "x_type", "out_type", "bias_type", "parts", "range_units", "longer_ranges"),
        *_fields(ctypes.c_uint32, "total_strips", "partial_stride", "ring_units", "half_stride", "activation_stride"),
        *_fields(ctypes.c_uint32, "plane_stride", "plane_units"),
    )


@dataclass(frozen=True, slots=True)
class ShardOffsets:
    """Where a shard lies in the flat tensors, in elements."""

    trellis: int
    suh: int
    svh: int


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """One transform and one GEMM launch, all but the pointers.

    Attributes:
        instance: the GEMM kernel.
        arguments: template of the launch arguments; pointers are zero, and shard pointers hold nothing.
        offsets: where each shard's tensors begin.
        grid: thread blocks of the GEMM, and row tiles.
        threads: threads a block of the GEMM.
        shared: its dynamic shared memory in bytes.
        transform_grid: blocks of the transform, or None where the GEMM rotates the input by itself.
        counters: arrival counters that the launch needs zeroed before it; they are zero again after it.
        scratch: bytes of scratch.
        scratch_parts: where its parts begin.
        out_features: columns of the output.
    """

    instance: Instance
    arguments: bytes
    offsets: tuple[ShardOffsets, ...]
    grid: tuple[int, int]
    threads: int
    shared: int
    transform_grid: tuple[int, int] | None
    counters: int
    scratch: int
    scratch_parts: dict[str, int]
    out_features: int


def linear_instance(form: Form, kinds: Sequence[tuple[int, int]], warps: int, planes: bool) -> Instance:
    """The GEMM kernel for a set of (half_bits, codebook) that one layer mixes; ``planes``: it rotates the input."""
    names = [
        f"Kind<{half_bits}, {codebook}, {int(form.arithmetic(codebook))}, INSTANCE_TILE_ROWS>"
        for half_bits, codebook in kinds
    ]
    return Instance(
        "linear.cu",
        "exl3_linear",
        (
            ("INSTANCE_PLANES", str(int(planes))),
            ("INSTANCE_TILE_ROWS", str(form.tile_rows)),
            ("INSTANCE_WARPS", str(warps)),
            ("INSTANCE_KINDS", ", ".join(names)),
        ),
    )


def _columns(arithmetic: Arithmetic, tile_rows: int) -> int:
    """Groups of 8 columns of the MMA's B operand."""
    return tile_rows // 4 if arithmetic is Arithmetic.INTEGER else max(1, tile_rows // 8)


def _activation_bytes(arithmetic: Arithmetic, rows: int) -> int:
    """Bytes of one unit's transformed activations."""
    matrices = 8 if arithmetic is Arithmetic.HALF else 16
    return matrices * (2 if arithmetic is Arithmetic.INTEGER else 1) * rows * 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _epilogue_bytes(warps: int, columns: int, tile_rows: int) -> int:
    """sizeof(Epilogue) in epilogue.cuh, rounded up to the barriers that follow it."""
    slots = warps // 2 if warps < 8 else 4
    return _round_up(slots * 8 * columns * 32 * 16 + tile_rows * (BLOCK + 4) * 4 + 2 * tile_rows * 4 + 4, 128)


def _ring(limits: GpuLimits, warps: int, fixed: int, unit: int) -> int:
    """Units that each warp's ring can hold, at most 2: one consumed while one arrives."""
    for units in (2, 1):
        if fixed + _round_up(warps * units * _HALVES * 8, 128) + warps * units * unit <= limits.shared_memory:
            return units
    return 0


def _warps(limits: GpuLimits, form: Form, arithmetics: Sequence[Arithmetic], half_stride: int) -> int:
    """Warps of a block: the most that fit.

    They decide the order of fp32 sums, so they are chosen for the largest tile of the arithmetic class: a row's bits
    must not depend on how many rows come with it.
    """
    rows = max(form.tile_rows, 8 if form.identity else 16)
    columns = max(_columns(arithmetic, rows) for arithmetic in arithmetics)
    activations = max(_activation_bytes(arithmetic, rows) for arithmetic in arithmetics)
    for warps in (16, 8, 4):
        if _ring(limits, warps, _epilogue_bytes(warps, columns, rows), _HALVES * half_stride + activations):
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
    units = min(range_units, max(shard.in_features for shard in shards) // _UNIT_IN)
    # The remainder modulo 128 keeps two neighbouring rows of a 16-byte read in different banks.
    if arithmetics == {Arithmetic.INTEGER}:
        stride = 64 * _round_up(units, 2) + 64
    else:
        stride = 128 * units + 16
    stored = rows * (2 if Arithmetic.INTEGER in arithmetics else 1)
    return _Planes(units, stride, _round_up((form.tile_rows + rows * units) * 4, 128) + _round_up(stored * stride, 128))


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
    _check_shards(shards, in_width)
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    arithmetics = [form.arithmetic(codebook) for _, codebook in kinds]
    columns = max(_columns(arithmetic, form.tile_rows) for arithmetic in arithmetics)
    row_tiles = -(-rows // form.tile_rows)
    stored_rows = min(rows, form.tile_rows)
    half_stride = max(4 * (_HALF_TILES * 16 * half_bits + _ROW_PAD) for half_bits, _ in kinds)
    warps = _warps(limits, form, arithmetics, half_stride)
    fixed = _epilogue_bytes(warps, columns, form.tile_rows)

    arguments = LinearArgs()
    totals, offsets = _place_shards(arguments, shards, kinds, form, rows)
    blocks = min(limits.multiprocessors, totals.units)
    range_units, longer_ranges = divmod(totals.units, blocks)

    plane = _planes(shards, form, stored_rows, range_units + (longer_ranges > 0))
    ring_units = _ring(limits, warps, fixed + plane.size, _HALVES * half_stride)
    if planes is None:
        planes = row_tiles == 1 and _rotations(shards, form, rows, plane.units) <= _PLANES_LIMIT
    planes = planes and row_tiles == 1 and ring_units > 0
    if planes:
        activation_stride = 0
        fixed += plane.size
    else:
        activation_stride = max(_round_up(_activation_bytes(arithmetic, stored_rows), 128) for arithmetic in arithmetics)
        ring_units = _ring(limits, warps, fixed, _HALVES * half_stride + activation_stride)
    unit = _HALVES * half_stride + activation_stride

    parts = max(1, min(max(shard.in_features for shard in shards) // BLOCK // 4, 16, limits.multiprocessors // rows))
    partial_stride = 8 * columns * 32
    counters = totals.strips * row_tiles
    sizes = {"partials": row_tiles * 2 * blocks * partial_stride * 16}
    if not planes:
        sizes |= {
            "activations": row_tiles * totals.activations,
            "scales": 4 * len(shards) * rows,
            "sums": 4 * rows * totals.depth,
            "counters": 4 * counters,
        }
    scratch_parts, scratch = {}, 0
    for name, size in sizes.items():
        scratch_parts[name] = scratch
        scratch += _round_up(size, _ALIGN)

    values = {
        "shard_count": len(shards), "rows": rows, "row_tiles": row_tiles, "tile_rows": form.tile_rows,
        "stored_rows": stored_rows, "in_width": in_width, "parts": parts, "range_units": range_units,
        "longer_ranges": longer_ranges, "total_strips": totals.strips, "partial_stride": partial_stride,
        "ring_units": ring_units, "half_stride": half_stride, "activation_stride": activation_stride,
        "plane_stride": plane.stride, "plane_units": plane.units,
    }  # fmt: skip
    for name, value in values.items():
        setattr(arguments, name, value)
    return LinearPlan(
        instance=linear_instance(form, kinds, warps, planes),
        arguments=bytes(arguments),
        offsets=offsets,
        grid=(blocks, row_tiles),
        threads=32 * warps,
        shared=fixed + _round_up(warps * ring_units * _HALVES * 8, 128) + warps * ring_units * unit,
        transform_grid=None if planes else (parts, rows),
        counters=counters,
        scratch=scratch,
        scratch_parts=scratch_parts,
        out_features=totals.columns,
    )


def _check_shards(shards: tuple[Shard, ...], in_width: int) -> None:
    if not 0 < len(shards) <= MAX_SHARDS:
        raise ValueError(f"{len(shards)} shards in one launch, expected 1 to {MAX_SHARDS}")
    for index, shard in enumerate(shards):
        if shard.in_features % BLOCK or shard.out_features % BLOCK or shard.in_features < in_width:
            raise ValueError(
                f"shard {index}: found {shard.in_features}×{shard.out_features} for {in_width} inputs, "
                f"expected multiples of {BLOCK} and at least as many inputs"
            )
        if not 0 <= shard.crop_start <= shard.crop_start + shard.crop_size <= shard.out_features:
            raise ValueError(
                f"shard {index}: crop {shard.crop_start}+{shard.crop_size} of {shard.out_features} columns"
            )


@dataclass(slots=True)
class _Totals:
    """Sums over a launch's shards: units, strips, bytes of activations a row tile, units of k, output columns."""

    units: int = 0
    strips: int = 0
    activations: int = 0
    depth: int = 0
    columns: int = 0


def _place_shards(
    arguments: LinearArgs, shards: Sequence[Shard], kinds: Sequence[tuple[int, int]], form: Form, rows: int
) -> tuple[_Totals, tuple[ShardOffsets, ...]]:
    """Fill in the shards' arguments."""
    totals, offsets = _Totals(), []
    row_tiles, stored_rows = -(-rows // form.tile_rows), min(rows, form.tile_rows)
    trellis = suh = svh = 0
    for index, shard in enumerate(shards):
        arithmetic = form.arithmetic(shard.codebook)
        strips, depth = shard.out_features // BLOCK, shard.in_features // _UNIT_IN
        arguments.shards[index] = ShardArgs(
            in_features=shard.in_features,
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=totals.columns,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            half_bits=shard.half_bits,
            arithmetic=arithmetic,
            first_unit=totals.units,
            first_strip=totals.strips,
            activation_block=row_tiles * totals.activations // 16,
            sum_block=rows * totals.depth,
        )
        offsets.append(ShardOffsets(trellis, suh, svh))
        totals.units += strips * depth
        totals.strips += strips
        totals.activations += depth * _activation_bytes(arithmetic, stored_rows)
        totals.depth += depth
        totals.columns += shard.crop_size
        trellis += shard.trellis_words
        suh += shard.in_features
        svh += shard.out_features
    return totals, tuple(offsets)
