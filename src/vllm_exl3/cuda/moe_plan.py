"""Kernels, grids, shared memory and scratch of one call of the MoE op: arithmetic on shapes, without torch or a GPU."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import ROW_PAD, UNIT_IN, Arithmetic, GpuLimits, round_up
from vllm_exl3.cuda.moe_geometry import NARROW, Layer, MoeForm
from vllm_exl3.pack.stored import BLOCK, Codebook

__all__ = [
    "COMBINE",
    "GROUP_ROWS",
    "ROUTE",
    "ROWS",
    "ROW_THREADS",
    "MoePlan",
    "exact",
    "forms",
    "gemm_instance",
    "narrow_blocks",
    "plan_moe",
]

ROWS = Instance("moe_rows.cu", "exl3_moe_rows")
GROUP_ROWS = tuple(
    Instance("moe_group_rows.cu", "exl3_moe_group_rows", (("INSTANCE_STAGE", str(stage)),)) for stage in range(2)
)
"""The input transforms where rows are grouped, of both stages."""

ROUTE = Instance("moe_route.cu", "exl3_moe_route")
COMBINE = Instance("moe_combine.cu", "exl3_moe_combine")

ROW_THREADS = 256
"""Of moe_rows.cuh."""

_NARROW_THREADS, _GROUP_ROWS = 256, 8
"""Threads of a block of the kernel of mma.sync, and rows that lie together for the other."""

_LIGHT_HALF_BITS = 8
"""Up to this 2·K the identities of four rows need no more than 80 registers."""

_CHUNK_ROWS = 16
"""Of moe_problem.cuh: rows that are transformed together where rows are grouped."""

_ALIGN = 256
_ROUTE_SHARED = 64 << 10
"""Bytes of shared memory that the sorting block's counts may take: decides its warps."""

_STASH_BYTES = 4 * 2 * 32 * 16 + 4 * 16 * 4
"""Of moe_group_rows.cuh: what the second stage's transform keeps of a chunk's 128-block."""

_BARRIER_BYTES, _STAGING_BYTES, _STAGES = 512, 32 * (BLOCK + 4) * 4, 12
"""Of moe_wide.cuh: bytes before the staging area, bytes of that a pair, and units in the ring at most."""


@dataclass(frozen=True, slots=True)
class MoePlan:
    """The launches of one window of tokens, all but the pointers.

    Attributes:
        gemms: the GEMM's instance for each stage.
        gemm_grid: its blocks, at most, for each stage.
        gemm_threads: threads of its blocks, for each stage.
        gemm_shared: its dynamic shared memory.
        route: threads and shared memory of the sorting launch, or None where the input transform sorts.
        rows_shared: dynamic shared memory of the input transforms of both stages.
        group_grid: blocks of the input transforms where rows are grouped.
        group_shared: their dynamic shared memory; None for the second stage's where it would not fit.
        values: fields of `MoeArgs` that follow from the shapes.
        stages: fields of its two `MoeStage`.
        scratch: bytes of scratch.
        parts: where its parts begin.
    """

    gemms: tuple[Instance, Instance]
    gemm_grid: tuple[int, int]
    gemm_threads: tuple[int, int]
    gemm_shared: int
    route: tuple[int, int] | None
    rows_shared: tuple[int, int]
    group_grid: int
    group_shared: tuple[int, int | None]
    values: dict[str, int]
    stages: tuple[dict[str, int], dict[str, int]]
    scratch: int
    parts: dict[str, int]


def forms(limits: GpuLimits) -> list[MoeForm]:
    """Every form that a GPU can run."""
    found = [MoeForm(True, 4), MoeForm(True, 8), MoeForm(False, 8), MoeForm(False, 16)]
    return [*found, MoeForm(False, 128), MoeForm(False, 256)] if limits.warpgroups else found


def narrow_blocks(codes: Sequence[tuple[int, int]], form: MoeForm) -> int:
    """Blocks of the kernel of mma.sync that a multiprocessor holds: three where registers suffice for it."""
    light = all(half_bits % 2 == 0 and half_bits <= _LIGHT_HALF_BITS for half_bits, _ in codes)
    return 3 if form.identity and form.tile_rows == 4 and light else 2


def exact(codes: Sequence[tuple[int, int]], form: MoeForm) -> bool:
    """Whether all sums are of integers, so that their order decides nothing, and few enough for twice the warps."""
    return form == MoeForm(True, 4) and all(codebook == Codebook.MUL1 for _, codebook in codes)


def gemm_instance(codes: Sequence[tuple[int, int]], form: MoeForm, *, alone: bool = False) -> Instance:
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
        macros = (("INSTANCE_PAIRS", str(form.pairs)), ("INSTANCE_KINDS", kinds))
        return Instance("moe_wide.cu", "exl3_moe_wide", macros)
    macros = (
        ("INSTANCE_TILE_ROWS", str(form.tile_rows)),
        ("INSTANCE_WARPS", "16" if alone else "8"),
        ("INSTANCE_BLOCKS", "1" if alone else str(narrow_blocks(codes, form))),
        ("INSTANCE_KINDS", kinds),
    )
    return Instance("moe_gemm.cu", "exl3_moe_gemm", macros)


def _route_shared(warps: int, experts: int) -> int:
    """Bytes that route() in moe_route.cuh takes."""
    return 4 * experts * (warps + 4)


@dataclass(frozen=True, slots=True)
class _Gemm:
    """What depends on the GEMM's kernel: threads and shared memory of a block, blocks that run at once, strips that
    a block takes at once, and arguments."""

    threads: int
    shared: int
    resident: int
    width: int
    values: dict[str, int]


def _gemm(layer: Layer, form: MoeForm, limits: GpuLimits) -> _Gemm:
    if not form.wide:
        values = {"thin_rows": form.tile_rows, "row_padding": 1, "grouped": 0}
        return _Gemm(_NARROW_THREADS, 0, narrow_blocks(layer.codes, form) * limits.multiprocessors, 1, values)
    pitch = form.pairs * 8 * 16 * max(half_bits for half_bits, _ in layer.codes) + ROW_PAD
    fixed, stride = _BARRIER_BYTES + form.pairs * _STAGING_BYTES, 4 * pitch + form.tile_rows * UNIT_IN * 2
    stages = min(_STAGES, (limits.shared_memory - fixed) // stride)
    values = {
        "thin_rows": form.tile_rows // 2, "row_padding": _GROUP_ROWS, "grouped": 1, "ring_stages": stages,
        "ring_stride": stride, "weight_pitch": pitch,
    }  # fmt: skip
    return _Gemm(256 * form.pairs, fixed + stages * stride, limits.multiprocessors, form.pairs, values)


@functools.lru_cache(maxsize=4096)
def plan_moe(layer: Layer, tokens: int, form: MoeForm, fat_rows: int, limits: GpuLimits) -> MoePlan:
    """Sizes of one window of tokens.

    Args:
        layer: what the layer is like.
        tokens: of the window.
        form: how to multiply.
        fat_rows: experts with more rows than this take row blocks of the form's full size.
        limits: the GPU.
    """
    slots, first = tokens * layer.top_k, layer.projections - 1
    hidden, intermediate = round_up(layer.hidden, BLOCK), round_up(layer.intermediate, BLOCK)
    gemm = _gemm(layer, form, limits)
    padding, least = gemm.values["row_padding"], min(form.tile_rows, gemm.values["thin_rows"])
    padded = min(slots * padding, round_up(slots + layer.experts * (padding - 1), padding))
    blocks = min(slots, slots // least + layer.experts)
    item = 2 if form.wide else 4

    sizes = {
        # The first stage's rows are dead when the second stage's outputs are written.
        "first_rows": max(first * padded * hidden * 2, slots * hidden * item),
        "hidden": first * slots * intermediate * item,
        "out_scales": 4 * slots * (first * intermediate + hidden) // BLOCK if form.wide else 0,
        "second_rows": padded * intermediate * 2,
        "undo": 4 * slots * (first + 1),
        "sums": 4 * slots * (first + 1),
        "order": 4 * padded,
        "places": 4 * slots,
        "blocks": 16 * blocks,
        "chunks": 16 * (padded // _CHUNK_ROWS + layer.experts) if form.wide else 0,
        "list_sizes": 8,
        "starts": 4 * (layer.experts + 1),
    }
    parts, scratch = {}, 0
    for name, size in sizes.items():
        parts[name] = scratch
        scratch += round_up(size, _ALIGN)

    stages = (
        {
            "first": 0, "projections": first, "in_width": layer.hidden, "in_features": hidden,
            "out_width": layer.intermediate, "out_features": intermediate,
        },
        {
            "first": first, "projections": 1, "in_width": layer.intermediate, "in_features": intermediate,
            "out_width": layer.hidden, "out_features": hidden,
        },
    )  # fmt: skip
    values = {
        "tokens": tokens, "top_k": layer.top_k, "slots": slots, "experts": layer.experts,
        "mapped": layer.total_experts, "projections": layer.projections, "tile_rows": form.tile_rows,
        "fat_rows": fat_rows, "padded_rows": padded, "identity": int(form.identity), **gemm.values,
    }  # fmt: skip
    items = [blocks * stage["projections"] * -(-stage["out_features"] // (gemm.width * BLOCK)) for stage in stages]
    # Few items leave a multiprocessor's other warps idle, so they get twice the warps.
    alone = [exact(layer.codes, form) and count <= limits.multiprocessors for count in items]
    route_warps = 32
    while route_warps > 8 and _route_shared(route_warps, layer.experts) > _ROUTE_SHARED:
        route_warps //= 2
    totals = [4 * _CHUNK_ROWS * stage["in_features"] // BLOCK for stage in stages]
    stash = totals[1] + intermediate // BLOCK * _STASH_BYTES
    sorting = 0 if form.wide else _route_shared(ROW_THREADS // 32, layer.experts)
    return MoePlan(
        gemms=(gemm_instance(layer.codes, form, alone=alone[0]), gemm_instance(layer.codes, form, alone=alone[1])),
        gemm_grid=(min(gemm.resident, items[0]), min(gemm.resident, items[1])),
        gemm_threads=(gemm.threads << alone[0], gemm.threads << alone[1]),
        gemm_shared=gemm.shared,
        route=(32 * route_warps, _route_shared(route_warps, layer.experts)) if form.wide else None,
        group_grid=min(8 * limits.multiprocessors, (padded // _CHUNK_ROWS + layer.experts) * first),
        group_shared=(totals[0], stash if stash <= limits.shared_memory - 1024 else None),
        rows_shared=(max(16 + 4 * hidden, sorting), 16 + 4 * intermediate),
        values=values,
        stages=stages,
        scratch=scratch,
        parts=parts,
    )
