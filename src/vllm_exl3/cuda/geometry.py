"""How one fused linear is laid out for the kernels: launch arguments, work units, scratch, shared memory.

Everything here is arithmetic on shapes, without torch or a GPU, and mirrors ``kernels/problem.cuh`` field by field.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

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
_TRANSFORM_THREADS = 512
_ALIGN = 256


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


class ShardArgs(ctypes.Structure):
    """``ShardArgs`` of problem.cuh."""

    _fields_ = (
        ("trellis", ctypes.c_uint64),
        ("suh", ctypes.c_uint64),
        ("svh", ctypes.c_uint64),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "in_features out_features crop_start crop_size out_column kind half_bits arithmetic codebook "
                "first_unit first_strip activation_block"
            ).split()
        ),
    )


class LinearArgs(ctypes.Structure):
    """``LinearArgs`` of problem.cuh."""

    _fields_ = (
        ("shards", ShardArgs * MAX_SHARDS),
        *((name, ctypes.c_uint64) for name in "x out bias activations scales sums counters partials".split()),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "shard_count rows row_tiles tile_rows stored_rows in_width x_type out_type bias_type parts total_units "
                "total_strips ring_units half_stride activation_stride"
            ).split()
        ),
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
        blocks: thread blocks of the GEMM.
        threads: threads a block of the GEMM.
        shared: its dynamic shared memory in bytes.
        transform_grid: blocks of the transform.
        scratch: bytes of scratch, and where its parts begin.
        out_features: columns of the output.
    """

    instance: Instance
    arguments: bytes
    offsets: tuple[ShardOffsets, ...]
    blocks: int
    threads: int
    shared: int
    transform_grid: tuple[int, int]
    scratch: int
    scratch_parts: dict[str, int]
    out_features: int


def linear_instance(form: Form, kinds: Sequence[tuple[int, int]], warps: int) -> Instance:
    """The GEMM kernel for a set of (half_bits, codebook) that one layer mixes."""
    names = [f"Kind<{half_bits}, {codebook}, {int(form.arithmetic(codebook))}, INSTANCE_TILE_ROWS>" for half_bits, codebook in kinds]
    return Instance(
        "linear.cu",
        "exl3_linear",
        (
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
    return _round_up(slots * 8 * columns * 32 * 16 + tile_rows * (BLOCK + 4) * 4 + tile_rows * 4 + 4, 128)


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


@functools.lru_cache(maxsize=4096)
def plan_linear(shards: tuple[Shard, ...], rows: int, in_width: int, form: Form, limits: GpuLimits) -> LinearPlan:
    """Cut one fused linear into work for the kernels.

    Args:
        shards: at most `MAX_SHARDS`.
        rows: tokens.
        in_width: columns of the input; up to a shard's ``in_features`` the rest counts as zero.
        form: how to multiply.
        limits: the GPU.

    Raises:
        ValueError: a shard breaks the layout's rules, or nothing fits the GPU's shared memory.
    """
    if not 0 < len(shards) <= MAX_SHARDS:
        raise ValueError(f"{len(shards)} shards in one launch, expected 1 to {MAX_SHARDS}")
    kinds = sorted({(shard.half_bits, shard.codebook) for shard in shards})
    arithmetics = [form.arithmetic(codebook) for _, codebook in kinds]
    columns = max(_columns(arithmetic, form.tile_rows) for arithmetic in arithmetics)
    row_tiles = -(-rows // form.tile_rows)
    stored_rows = min(rows, form.tile_rows)
    half_stride = max(4 * (_HALF_TILES * 16 * half_bits + _ROW_PAD) for half_bits, _ in kinds)
    activation_stride = max(_round_up(_activation_bytes(arithmetic, stored_rows), 128) for arithmetic in arithmetics)
    warps = _warps(limits, form, arithmetics, half_stride)
    fixed = _epilogue_bytes(warps, columns, form.tile_rows)
    unit = _HALVES * half_stride + activation_stride
    ring_units = _ring(limits, warps, fixed, unit)

    arguments = LinearArgs()
    offsets = []
    unit_count = strip_count = activation = out_column = trellis = suh = svh = 0
    for index, shard in enumerate(shards):
        if shard.in_features % BLOCK or shard.out_features % BLOCK or shard.in_features < in_width:
            raise ValueError(
                f"shard {index}: found {shard.in_features}×{shard.out_features} for {in_width} inputs, "
                f"expected multiples of {BLOCK} and at least as many inputs"
            )
        if not 0 <= shard.crop_start <= shard.crop_start + shard.crop_size <= shard.out_features:
            raise ValueError(f"shard {index}: crop {shard.crop_start}+{shard.crop_size} of {shard.out_features} columns")
        arithmetic = form.arithmetic(shard.codebook)
        arguments.shards[index] = ShardArgs(
            in_features=shard.in_features,
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=out_column,
            kind=kinds.index((shard.half_bits, shard.codebook)),
            half_bits=shard.half_bits,
            arithmetic=arithmetic,
            codebook=shard.codebook,
            first_unit=unit_count,
            first_strip=strip_count,
            activation_block=activation // 16,
        )
        offsets.append(ShardOffsets(trellis, suh, svh))
        strips = shard.out_features // BLOCK * row_tiles
        depth = shard.in_features // _UNIT_IN
        strip_count += strips
        unit_count += strips * depth
        activation += row_tiles * depth * _activation_bytes(arithmetic, stored_rows)
        out_column += shard.crop_size
        trellis += shard.trellis_words
        suh += shard.in_features
        svh += shard.out_features
    blocks = min(limits.multiprocessors, unit_count)
    widest = max(shard.in_features for shard in shards) // BLOCK
    parts = max(1, min(widest // 4, 16, limits.multiprocessors // rows))

    sizes = {
        "activations": activation,
        "scales": 4 * len(shards) * rows,
        "sums": 4 * len(shards) * rows * parts,
        "counters": 4 * strip_count,
        "partials": 2 * blocks * 8 * columns * 32 * 16,
    }
    parts_at, scratch = {}, 0
    for name, size in sizes.items():
        parts_at[name] = scratch
        scratch += _round_up(size, _ALIGN)

    arguments.shard_count = len(shards)
    arguments.rows = rows
    arguments.row_tiles = row_tiles
    arguments.tile_rows = form.tile_rows
    arguments.stored_rows = stored_rows
    arguments.in_width = in_width
    arguments.parts = parts
    arguments.total_units = unit_count
    arguments.total_strips = strip_count
    arguments.ring_units = ring_units
    arguments.half_stride = half_stride
    arguments.activation_stride = activation_stride
    return LinearPlan(
        instance=linear_instance(form, kinds, warps),
        arguments=bytes(arguments),
        offsets=tuple(offsets),
        blocks=blocks,
        threads=32 * warps,
        shared=fixed + _round_up(warps * ring_units * _HALVES * 8, 128) + warps * ring_units * unit,
        transform_grid=(parts, rows),
        scratch=scratch,
        scratch_parts=parts_at,
        out_features=out_column,
    )
