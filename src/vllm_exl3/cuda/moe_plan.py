"""Kernels, grids, shared memory and scratch of one call of the MoE op: arithmetic on shapes, without torch or a GPU."""

import functools
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import GpuLimits, round_up
from vllm_exl3.cuda.moe_gemm import exact, gemm_instance, plan_gemm
from vllm_exl3.cuda.moe_geometry import Layer, MoeForm
from vllm_exl3.pack.stored import BLOCK

__all__ = [
    "COMBINE",
    "COMBINE_ROWS",
    "COMBINE_ROWS_THREADS",
    "COUNT",
    "GROUP_ROWS",
    "ROUTE",
    "ROWS",
    "ROW_THREADS",
    "TURNS",
    "TURN_THREADS",
    "MoePlan",
    "plan_moe",
]

ROWS = Instance("moe_rows.cu", "exl3_moe_rows")
GROUP_ROWS = tuple(
    Instance("moe_group_rows.cu", "exl3_moe_group_rows", (("INSTANCE_STAGE", str(stage)),)) for stage in range(2)
)
"""The input transforms where rows are grouped, of both stages."""

COUNT = Instance("moe_route.cu", "exl3_moe_count")
ROUTE = Instance("moe_route.cu", "exl3_moe_route")
TURNS = Instance("moe_turns.cu", "exl3_moe_turns")
"""The order of work where rows are grouped and kinds mix."""

COMBINE = Instance("moe_combine.cu", "exl3_moe_combine")
COMBINE_ROWS = Instance("moe_combine_rows.cu", "exl3_moe_combine_rows")
"""The weighted sum where rows are grouped."""

ROW_THREADS = 256
"""Of moe_rows.cuh."""

TURN_THREADS = 1024
"""Of moe_turns.cu."""

_CHUNK_ROWS = 16
"""Of moe_problem.cuh: rows that are transformed together where rows are grouped."""

_ALIGN = 256
_ROUTE_SHARED = 64 << 10
"""Bytes of shared memory that a single sorting block's counts may take: decides its warps."""

_FEW_SHARED = 4 * (2 * 128 + 1)
"""Bytes of shared memory that sorting few slots takes: of moe_route_few.cuh."""

_ROUTE_SLOTS, _ROUTE_BLOCKS = 1024, 64
"""Slots from which on there is a sorting block for each so many, and at most how many blocks."""

_LARGEST_BLOCKS = 512
"""Blocks that find tokens' largest values, at most."""

_SCALE_BYTES, _KEPT_BYTES = 3 * 2 * BLOCK, 4 * 2 * 32 * 16 + 4 * 16 * 4
"""Of moe_group_hidden.cuh, of a chunk's 128-block: a warp's room for scales, and what is kept of what was activated."""

_CHUNKS_BYTES, _INPUT_BYTES = 16 * (6 * 4 + 16 * 8), 2 * (8 * 512 + 2 * 2 * BLOCK)
"""Of moe_group_inputs.cuh: what is known of a block's next chunks; a warp's two slots for x and suh of a 128-block."""

_HIDDEN_WARPS = 12
"""Of moe_group_hidden.cuh: warps that a multiprocessor's registers hold."""

COMBINE_ROWS_THREADS = 128
"""Of moe_combine_rows.cu."""

_COMBINE_WARPS = 32
"""Of it on a multiprocessor, at least, where there are enough tokens and channels: twice what one holds."""

_SUMS_BEYOND = 256
"""Rows beyond the last whose sums moe_finish.cuh reads, and does not use."""


@dataclass(frozen=True, slots=True)
class MoePlan:
    """The launches of one window of tokens, all but the pointers.

    Attributes:
        gemms: the GEMM's instance for each stage.
        gemm_grid: its blocks, at most, for each stage.
        gemm_cluster: blocks of its clusters.
        gemm_threads: threads of its blocks, for each stage.
        gemm_shared: its dynamic shared memory.
        turns: bytes of the first stage's `turns`; 0 where work is not sorted by kind.
        route: the sorting launch, or None where the input transform sorts: its blocks in x, which sort, and in y;
            threads and shared memory.
        rows_shared: dynamic shared memory of the input transforms of both stages where rows lie by slot.
        group_grid: blocks of the input transforms where rows are grouped.
        group_threads: their threads.
        group_shared: their dynamic shared memory.
        combine_grid: blocks of the weighted sum where rows are grouped.
        values: fields of `MoeArgs` that follow from the shapes.
        stages: fields of its two `MoeStage`.
        scratch: bytes of scratch.
        parts: where its parts begin.
        fact_rows: rows that `undo` and `sums` have for each projection.
    """

    gemms: tuple[Instance, Instance]
    gemm_grid: tuple[int, int]
    gemm_cluster: int
    gemm_threads: tuple[int, int]
    gemm_shared: int
    turns: int
    route: tuple[int, int, int, int] | None
    rows_shared: tuple[int, int]
    group_grid: tuple[int, int]
    group_threads: tuple[int, int]
    group_shared: tuple[int, int]
    combine_grid: int
    values: dict[str, int]
    stages: tuple[dict[str, int], dict[str, int]]
    scratch: int
    parts: dict[str, int]
    fact_rows: int


def _route_shared(warps: int, experts: int) -> int:
    """Bytes that route() in moe_route.cuh takes."""
    return 4 * experts * (warps + 4)


def _even_warps(blocks: int, most: int = ROW_THREADS // 32) -> int:
    """Warps of a thread block that goes over so many 128-blocks, such that none is idle in the last round."""
    return -(-blocks // -(-blocks // most))


def _hidden(blocks: int, totals: int, limits: GpuLimits) -> tuple[int, int, bool]:
    """Of the second stage's input transform: warps, shared memory, and whether what was activated is kept in it.

    As many warps as have something to do at once on a multiprocessor, in thread blocks as large as that allows.
    """
    room = limits.shared_memory

    def shared(warps: int, kept: int) -> int:
        return totals + warps * _SCALE_BYTES + kept * _KEPT_BYTES

    def busy(warps: int) -> tuple[float, int]:
        resident = min(_HIDDEN_WARPS // warps, room // (shared(warps, blocks) + 1024))
        return resident * blocks / -(-blocks // warps), warps

    warps = max(range(1, _HIDDEN_WARPS + 1), key=busy)
    if busy(warps)[0] > 0:
        return warps, shared(warps, blocks), True
    warps = _even_warps(blocks)
    return warps, shared(warps, warps), False


def _combine_grid(tokens: int, blocks: int, limits: GpuLimits) -> int:
    """Blocks of moe_combine_rows.cu: as many warps a token as give every multiprocessor some rounds of them."""
    split = min(blocks, -(-_COMBINE_WARPS * limits.multiprocessors // tokens))
    return -(-tokens * split * 32 // COMBINE_ROWS_THREADS)


def _route(largest: int, slots: int, experts: int) -> tuple[int, int, int, int]:
    """`MoePlan.route`: one block with as many warps as fit sorts, or many small ones; others find `largest` values."""
    blocks, warps = min(_ROUTE_BLOCKS, slots // _ROUTE_SLOTS), ROW_THREADS // 32
    if blocks <= 1:
        blocks, warps = 1, 32
        while warps > 8 and _route_shared(warps, experts) > _ROUTE_SHARED:
            warps //= 2
    others = min(-(-largest // (warps * blocks)), _LARGEST_BLOCKS // blocks)
    return blocks, 1 + others, 32 * warps, _route_shared(warps, experts)


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
    gemm = plan_gemm(layer, form, limits)
    padding, least = gemm.values["row_padding"], min(form.tile_rows, gemm.values["thin_rows"])
    padded = min(slots * padding, round_up(slots + layer.experts * (padding - 1), padding))
    blocks = min(slots, slots // least + layer.experts)
    item, rows = (2, padded) if form.wide else (4, slots)  # of outputs; in all
    by_kind = form.wide and len(layer.codes) > 1
    facts = 4 * (rows * (first + 1) + (_SUMS_BEYOND if form.wide else 0))

    chunks = padded // _CHUNK_ROWS + layer.experts
    route = _route(tokens + layer.experts * first, slots, layer.experts)

    sizes = {
        # The first stage's rows are dead when the second stage's outputs are written.
        "first_rows": max(first * padded * hidden * 2, rows * hidden * item),
        "hidden": first * rows * intermediate * item,
        "second_rows": padded * intermediate * 2,
        "undo": facts,
        "sums": facts,
        "order": 4 * padded,
        "places": 4 * slots,
        "blocks": 16 * blocks,
        "chunks": 16 * chunks if form.wide else 0,
        "turns": 16 * blocks * layer.projections if by_kind else 0,
        "list_sizes": 8,
        "totals": 4 * route[0] * layer.experts,
        "row_largest": 4 * tokens,
        "scale_largest": 4 * layer.experts * first,
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
    totals = [4 * _CHUNK_ROWS * stage["in_features"] // BLOCK for stage in stages]
    hidden_warps, hidden_shared, keep = _hidden(intermediate // BLOCK, totals[1], limits)
    values = {
        "tokens": tokens, "top_k": layer.top_k, "slots": slots, "experts": layer.experts,
        "mapped": layer.total_experts, "projections": layer.projections, "tile_rows": form.tile_rows,
        "fat_rows": fat_rows, "padded_rows": padded, "identity": int(form.identity),
        "keep_hidden": int(keep), **gemm.values,
    }  # fmt: skip
    items = [blocks * stage["projections"] * -(-stage["out_features"] // (gemm.width * BLOCK)) for stage in stages]
    # Few items leave a multiprocessor's other warps idle, so they get twice the warps.
    alone = [exact(layer.codes, form) and count <= limits.multiprocessors for count in items]
    sorting = 0 if form.wide else max(_route_shared(ROW_THREADS // 32, layer.experts), _FEW_SHARED)
    return MoePlan(
        gemms=(gemm_instance(layer.codes, form, alone=alone[0]), gemm_instance(layer.codes, form, alone=alone[1])),
        gemm_grid=(form.cluster * min(gemm.resident, items[0]), form.cluster * min(gemm.resident, items[1])),
        gemm_cluster=form.cluster,
        gemm_threads=(gemm.threads << alone[0], gemm.threads << alone[1]),
        gemm_shared=gemm.shared,
        turns=16 * blocks * first if by_kind else 0,
        route=route if form.wide else None,
        group_grid=(min(2 * limits.multiprocessors, chunks), min(8 * limits.multiprocessors, chunks)),
        group_threads=(32 * _even_warps(hidden // BLOCK), 32 * hidden_warps),
        group_shared=(_CHUNKS_BYTES + first * totals[0] + _even_warps(hidden // BLOCK) * _INPUT_BYTES, hidden_shared),
        combine_grid=_combine_grid(tokens, hidden // BLOCK, limits),
        rows_shared=(max(16 + 4 * hidden, sorting), 16 + 4 * intermediate),
        values=values,
        stages=stages,
        scratch=scratch,
        parts=parts,
        fact_rows=rows,
    )
