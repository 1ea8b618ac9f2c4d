"""Which kernel multiplies a layer's experts in which form, and what it holds: arithmetic, without torch or a GPU."""

from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import BLOCK_K, ROW_PAD, Arithmetic, Codes, GpuLimits
from vllm_exl3.cuda.moe_geometry import NARROW, Layer, MoeForm
from vllm_exl3.pack.stored import Codebook

__all__ = ["FEW_KINDS", "Gemm", "exact", "forms", "gemm_instance", "narrow_blocks", "plan_gemm"]

_WIDE_BLOCKS = {32: 4, 64: 3, 128: 1, 256: 1}
"""Blocks of the warpgroup kernel that a multiprocessor holds, by the size of row blocks: what registers suffice for."""

_MANY_KINDS, FEW_KINDS = 7, 3
"""Kinds of weights above which the warpgroup kernel has loops for one width of product, and for a few."""

_DEVICE = constants("moe/cluster.cuh")
_NARROW_THREADS, _GROUP_ROWS = 256, _DEVICE["GROUP_ROWS"]
"""Threads of a block of the kernel of mma.sync, and rows that lie together for the other."""

_LIGHT_HALF_BITS = 8
"""Up to this 2·K the identities of four rows need no more than 80 registers."""

_BARRIER_BYTES, _MOST_STAGES = _DEVICE["MOE_BARRIER_BYTES"], 12
"""Bytes of shared memory before the pipeline, and stages of it at most."""

_SHARED_MEMORY, _BLOCK_RESERVE = 227 << 10, 1 << 10
"""Shared memory of a block on the GPUs that have wgmma, and what is taken for each block besides."""

_PAIR_THREADS, _PRODUCERS = _DEVICE["PAIR_THREADS"], _DEVICE["PRODUCER_THREADS"]
"""Threads of a pair of warpgroups, and of the producer's."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """The part of a plan that depends on the GEMM's kernel.

    Attributes:
        threads: of a block.
        shared: its dynamic shared memory in bytes.
        resident: clusters (or blocks) that run at once.
        width: Hadamard blocks that one takes at once.
        values: fields of `MoeArgs`.
    """

    threads: int
    shared: int
    resident: int
    width: int
    values: dict[str, int]


def forms(limits: GpuLimits) -> list[MoeForm]:
    """Every form that a GPU can run."""
    found = [MoeForm(True, 4), MoeForm(True, 8), MoeForm(False, 8), MoeForm(False, 16)]
    return [*found, *(MoeForm(False, rows) for rows in _WIDE_BLOCKS)] if limits.warpgroups else found


def narrow_blocks(codes: Codes, form: MoeForm) -> int:
    """Blocks of the kernel of mma.sync that a multiprocessor holds: three where registers suffice for it."""
    light = all(half_bits % 2 == 0 and half_bits <= _LIGHT_HALF_BITS for half_bits, _ in codes)
    return 3 if form.identity and form.tile_rows == 4 and light else 2


def exact(codes: Codes, form: MoeForm) -> bool:
    """True where all sums are of integers, so that their order decides nothing, and few enough for twice the warps."""
    return form == MoeForm(True, 4) and all(codebook == Codebook.MUL1 for _, codebook in codes)


def gemm_instance(codes: Codes, form: MoeForm, *, alone: bool = False) -> Instance:
    """The grouped GEMM for these (2·K, codebook).

    Args:
        codes: what occurs in the layer.
        form: how to multiply.
        alone: whether an item has a multiprocessor to itself; only where sums are exact.
    """

    def arithmetic(codebook: int) -> Arithmetic:
        if not form.identity:
            return Arithmetic.HALF
        return Arithmetic.INTEGER if codebook == Codebook.MUL1 else Arithmetic.PAIR

    rows = NARROW if form.wide else form.tile_rows
    kinds = ", ".join(
        f"Kind<{half_bits}, {codebook}, {int(arithmetic(codebook))}, {rows}>" for half_bits, codebook in codes
    )
    if form.wide:
        least, step = _columns(form, len(codes))
        macros = (
            ("INSTANCE_ROWS", str(form.tile_rows)),
            ("INSTANCE_LEAST", str(least)),
            ("INSTANCE_STEP", str(step)),
            ("INSTANCE_KINDS", kinds),
        )
        if form.cluster > 1:
            return Instance("moe/cluster.cu", "exl3_moe_cluster", (("INSTANCE_CLUSTER", str(form.cluster)), *macros))
        held = (
            ("INSTANCE_BLOCKS", str(_wide_blocks(codes, form))),
            ("INSTANCE_K_BLOCKS", str(_pipeline(codes, form)[0])),
        )
        return Instance("moe/wide.cu", "exl3_moe_wide", (*held, *macros))
    macros = (
        ("INSTANCE_TILE_ROWS", str(form.tile_rows)),
        ("INSTANCE_WARPS", "16" if alone else "8"),
        ("INSTANCE_BLOCKS", "1" if alone else str(narrow_blocks(codes, form))),
        ("INSTANCE_KINDS", kinds),
    )
    return Instance("moe/gemm.cu", "exl3_moe_gemm", macros)


def _columns(form: MoeForm, kinds: int) -> tuple[int, int]:
    """Columns of the narrowest product, and from one width to the next.

    Every width is a loop of its own, of every kind; with too many of them ptxas puts waits between the products.
    """
    rows = form.tile_rows
    if kinds > _MANY_KINDS:
        return rows, rows
    if kinds > FEW_KINDS:
        return {32: (16, 16), 64: (48, 16), 128: (64, 32), 256: (144, 112)}[rows]
    if rows > 64:
        return 64, 32 if kinds == 1 or rows == 128 else 64
    return rows // 2, 16 if kinds == 1 else rows // 2


def _wide_blocks(codes: Codes, form: MoeForm) -> int:
    """Blocks of the warpgroup kernel that a multiprocessor holds. One that knows several kinds takes more registers."""
    kinds = len(codes)
    fewer = 4 if kinds == 1 else 3 if kinds < 4 and form.tile_rows == 32 else 2
    return min(_WIDE_BLOCKS[form.tile_rows], fewer)


def _pipeline(codes: Codes, form: MoeForm) -> tuple[int, dict[str, int]]:
    """K blocks of a stage, and the pipeline's fields of `MoeArgs`: several a stage only where three such stages fit."""
    pitch = 8 * 16 * max(half_bits for half_bits, _ in codes) + ROW_PAD
    activations = form.tile_rows * BLOCK_K * 2
    held = _wide_blocks(codes, form)
    room = (_SHARED_MEMORY + _BLOCK_RESERVE) // held - _BLOCK_RESERVE - _BARRIER_BYTES
    spare = form.tile_rows == 32 or held == 2  # registers
    k_blocks = 2 if spare and room // (2 * (4 * pitch + activations)) >= 3 else 1
    stride = k_blocks * (4 * pitch + activations)
    stages = min(_MOST_STAGES, room // stride)
    return k_blocks, {
        "pipeline_stages": stages, "stage_stride": stride, "weight_pitch": pitch, "activation_stride": activations,
    }  # fmt: skip


def plan_gemm(layer: Layer, form: MoeForm, limits: GpuLimits) -> Gemm:
    """Threads, shared memory and arguments of a layer's GEMM.

    Raises:
        ValueError: the GPU has fewer multiprocessors than a cluster has blocks that need one each.
    """
    if not form.wide:
        values = {"thin_rows": form.tile_rows, "row_padding": 1, "grouped": 0}
        return Gemm(_NARROW_THREADS, 0, narrow_blocks(layer.codes, form) * limits.multiprocessors, 1, values)
    _, ring = _pipeline(layer.codes, form)
    values = {"thin_rows": form.tile_rows // 2, "row_padding": _GROUP_ROWS, "grouped": 1, **ring}
    threads = _PAIR_THREADS + (_PRODUCERS if form.cluster > 1 else 0)
    resident = _wide_blocks(layer.codes, form) * limits.multiprocessors // form.cluster
    if resident == 0:
        raise ValueError(
            f"routed experts on a GPU of {limits.multiprocessors} multiprocessor, expected {form.cluster} or more: as "
            "many share a row block. Serve on a GPU, or a part of one, that has them, or with "
            "VLLM_EXL3_MOE_KERNEL=reference and --enforce-eager."
        )
    shared = _BARRIER_BYTES + ring["pipeline_stages"] * ring["stage_stride"]
    return Gemm(threads, shared, resident, form.cluster, values)
