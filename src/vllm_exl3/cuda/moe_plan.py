"""The launches of one call of the MoE op: kernels, grids and shared memory. Arithmetic, without torch or a GPU."""

import functools
from dataclasses import dataclass

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import GpuLimits, round_up
from vllm_exl3.cuda.moe_gemm import Gemm, exact, gemm_instance, plan_gemm
from vllm_exl3.cuda.moe_geometry import Layer, MoeForm
from vllm_exl3.cuda.moe_scratch import CHUNK_ROWS, Scratch, Work, most_work, plan_scratch
from vllm_exl3.pack.stored import BLOCK

__all__ = [
    "COMBINE",
    "COMBINE_ROWS",
    "COUNT",
    "GROUP_ROWS",
    "ROUTE",
    "ROWS",
    "SCHEDULE",
    "SWIGLU_ROWS",
    "Launch",
    "MoePlan",
    "plan_moe",
]

ROWS = Instance("moe/rows.cu", "exl3_moe_rows")
GROUP_ROWS = tuple(
    Instance("moe/group_rows.cu", "exl3_moe_group_rows", (("INSTANCE_STAGE", str(stage)),)) for stage in range(2)
)
"""The input transforms where rows are grouped, of both stages."""

SWIGLU_ROWS = Instance("moe/group_rows.cu", "exl3_moe_group_rows", (("INSTANCE_STAGE", "2"),))
"""The second stage's of experts with SwiGLU and without biases."""

COUNT = Instance("moe/route.cu", "exl3_moe_count")
ROUTE = Instance("moe/route.cu", "exl3_moe_route")
SCHEDULE = Instance("moe/schedule.cu", "exl3_moe_schedule")
"""The order of work where rows are grouped and kinds mix."""

COMBINE = Instance("moe/combine.cu", "exl3_moe_combine")
COMBINE_ROWS = Instance("moe/combine_rows.cu", "exl3_moe_combine_rows")
"""The weighted sum where rows are grouped."""

_ROW_THREADS = constants("moe/rows.cuh")["ROW_THREADS"]
_SCHEDULE_THREADS = constants("moe/schedule.cu")["SCHEDULE_THREADS"]
_COMBINE_ROWS_THREADS = constants("moe/combine_rows.cu")["COMBINE_ROWS_THREADS"]

_COMBINE_THREADS = constants("moe/combine.cu")["COMBINE_THREADS"]
_COMBINE_CHANNELS = 4 * _COMBINE_THREADS
"""Channels that a block of moe/combine.cu adds up: four a thread."""

_ROUTE_SHARED = 64 << 10
"""Bytes of shared memory that a single sorting block's counts may take: decides its warps."""

_FEW_SHARED = 4 * (2 * constants("moe/route_few.cuh")["FEW_SLOTS"] + 1)
"""Bytes of shared memory that sorting few slots takes."""

_ROUTE_SLOTS, _ROUTE_BLOCKS = 1024, 64
"""Slots from which on there is a sorting block for each so many, and at most how many blocks."""

_LARGEST_BLOCKS = 512
"""Blocks that find tokens' largest values, at most."""

_SCALE_BYTES, _KEPT_BYTES = 3 * 2 * BLOCK, 4 * 2 * 32 * 16 + 4 * 16 * 4
"""Bytes in moe/group_hidden.cuh for a 128-block of a chunk: a warp's scales, and cached activations."""

_CHUNKS_BYTES, _INPUT_BYTES = 16 * (6 * 4 + 16 * 8), 2 * (8 * 512 + 2 * 2 * BLOCK)
"""Bytes in moe/group_inputs.cuh: facts of a block's next chunks; a warp's two buffers for x and suh of a 128-block."""

_EIGHT_BYTES = 4 * 32 * 16 + 2 * 8 * 4
"""Bytes in moe/group_swiglu.cuh for eight rows of a 128-block."""

_HIDDEN_WARPS, _SWIGLU_WARPS = 12, 20
"""Warps that a multiprocessor's registers hold of either: RESIDENT_THREADS of moe/group_rows.cuh."""

_COMBINE_WARPS = 32
"""Warps of moe/combine_rows.cu for a multiprocessor, at least, where there is work: twice as many as one holds."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, all but the arguments.

    Attributes:
        instance: the kernel.
        grid: blocks in x and y.
        threads: of a block.
        shared: its dynamic shared memory in bytes.
        stage: which one it works on, where it asks.
        cluster: blocks in x that form a cluster.
    """

    instance: Instance
    grid: tuple[int, int]
    threads: int
    shared: int = 0
    stage: int = 0
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class MoePlan:
    """One window of tokens, all but the pointers.

    Attributes:
        launches: in their order.
        values: fields of `MoeArgs` that follow from the shapes.
        stages: fields of its two `MoeStage`.
        scratch: what the launches hand on to each other.
    """

    launches: tuple[Launch, ...]
    values: dict[str, int]
    stages: tuple[dict[str, int], dict[str, int]]
    scratch: Scratch


@functools.lru_cache(maxsize=4096)
def plan_moe(layer: Layer, tokens: int, form: MoeForm, fat_rows: int, limits: GpuLimits) -> MoePlan:
    """The launches that serve one window of tokens.

    Args:
        layer: what the layer is like.
        tokens: of the window.
        form: how to multiply.
        fat_rows: experts with more rows than this take row blocks of the form's full size.
        limits: the GPU.
    """
    stages, gemm = _stages(layer), plan_gemm(layer, form, limits)
    work = most_work(layer, tokens, form, gemm)
    first, second = (_gemm(layer, form, gemm, work, stage, limits) for stage in stages)
    sorters, keep = 1, False
    if form.wide:
        sorting, sorters = _sorting(layer, tokens, work)
        swiglu = _swiglu(stages[1], work, limits) if layer.swiglu else None
        hidden, keep = (swiglu, False) if swiglu is not None else _hidden(stages[1], work, limits)
        launches = (*sorting, _inputs(stages[0], work, limits), first, hidden, second, _sum(tokens, stages[1], limits))
    else:
        launches = _by_slot(layer, tokens, work, stages, first, second)
    values = {
        "tokens": tokens, "top_k": layer.top_k, "slots": work.slots, "experts": layer.experts,
        "mapped": layer.total_experts, "projections": layer.projections, "tile_rows": form.tile_rows,
        "fat_rows": fat_rows, "padded_rows": work.padded, "identity": int(form.identity),
        "keep_hidden": int(keep), **gemm.values,
    }  # fmt: skip
    return MoePlan(launches, values, stages, plan_scratch(layer, tokens, form, work, stages, sorters))


def _stages(layer: Layer) -> tuple[dict[str, int], dict[str, int]]:
    """Fields of `MoeStage`: gate and up (or up alone), and down."""
    hidden, intermediate = round_up(layer.hidden, BLOCK), round_up(layer.intermediate, BLOCK)
    return (
        {
            "first": 0, "projections": layer.projections - 1, "in_width": layer.hidden, "in_features": hidden,
            "out_width": layer.intermediate, "out_features": intermediate,
        },
        {
            "first": layer.projections - 1, "projections": 1, "in_width": layer.intermediate,
            "in_features": intermediate, "out_width": layer.hidden, "out_features": hidden,
        },
    )  # fmt: skip


def _gemm(layer: Layer, form: MoeForm, gemm: Gemm, work: Work, stage: dict[str, int], limits: GpuLimits) -> Launch:
    items = work.blocks * stage["projections"] * -(-stage["out_features"] // (gemm.width * BLOCK))
    # Few items leave a multiprocessor's other warps idle, so they get twice the warps.
    alone = exact(layer.codes, form) and items <= limits.multiprocessors
    return Launch(
        gemm_instance(layer.codes, form, alone=alone),
        (form.cluster * min(gemm.resident, items), 1),
        gemm.threads << alone,
        gemm.shared,
        int(stage["first"] > 0),
        form.cluster,
    )


def _by_slot(
    layer: Layer, tokens: int, work: Work, stages: tuple[dict[str, int], ...], first: Launch, second: Launch
) -> tuple[Launch, ...]:
    """Where rows lie by slot. One more block of the input transform sorts the slots meanwhile."""
    sorting = max(_route_shared(_ROW_THREADS // 32, layer.experts), _FEW_SHARED)
    shared = [16 + 4 * stage["in_features"] for stage in stages]
    parts = -(-stages[1]["out_width"] // _COMBINE_CHANNELS)
    return (
        Launch(ROWS, (work.slots + 1, stages[0]["projections"]), _ROW_THREADS, max(shared[0], sorting), 0),
        first,
        Launch(ROWS, (work.slots, 1), _ROW_THREADS, shared[1], 1),
        second,
        Launch(COMBINE, (tokens, parts), _COMBINE_THREADS, 0, 1),
    )


def _route_shared(warps: int, experts: int) -> int:
    """Bytes that route() in moe/route.cuh takes."""
    return 4 * experts * (warps + 4)


def _sorting(layer: Layer, tokens: int, work: Work) -> tuple[list[Launch], int]:
    """The launches that make the lists where rows are grouped, and how many thread blocks sort slots.

    One block with as many warps as fit, or many small ones; others find the largest values of tokens and scales.
    """
    blocks, warps = min(_ROUTE_BLOCKS, work.slots // _ROUTE_SLOTS), _ROW_THREADS // 32
    if blocks <= 1:
        blocks, warps = 1, 32
        while warps > 8 and _route_shared(warps, layer.experts) > _ROUTE_SHARED:
            warps //= 2
    largest = tokens + layer.experts * (layer.projections - 1)
    others = min(-(-largest // (warps * blocks)), _LARGEST_BLOCKS // blocks)
    launches = [Launch(ROUTE, (blocks, 1 + others), 32 * warps, _route_shared(warps, layer.experts))]
    if blocks > 1:
        launches.insert(0, Launch(COUNT, (blocks, 1), 32 * warps, 4 * layer.experts))
    if work.by_kind:
        launches.append(Launch(SCHEDULE, (2, 1), _SCHEDULE_THREADS))
    return launches, blocks


def _inputs(stage: dict[str, int], work: Work, limits: GpuLimits) -> Launch:
    """The first stage's input transform where rows are grouped."""
    blocks = stage["in_features"] // BLOCK
    warps = _even_warps(blocks)
    shared = _CHUNKS_BYTES + stage["projections"] * _totals(blocks) + warps * _INPUT_BYTES
    return Launch(GROUP_ROWS[0], (min(2 * limits.multiprocessors, work.chunks), 1), 32 * warps, shared, 0)


def _hidden(stage: dict[str, int], work: Work, limits: GpuLimits) -> tuple[Launch, bool]:
    """The second stage's, and whether what was activated is kept in shared memory.

    As many warps as have something to do at once on a multiprocessor, in thread blocks as large as that allows.
    """
    blocks, room = stage["in_features"] // BLOCK, limits.shared_memory

    def shared(warps: int, kept: int) -> int:
        return _totals(blocks) + warps * _SCALE_BYTES + kept * _KEPT_BYTES

    def busy(warps: int) -> tuple[float, int]:
        resident = min(_HIDDEN_WARPS // warps, room // (shared(warps, blocks) + 1024))
        return resident * blocks / -(-blocks // warps), warps

    warps = max(range(1, _HIDDEN_WARPS + 1), key=busy)
    keep = busy(warps)[0] > 0
    if not keep:
        warps = _even_warps(blocks)
    grid = (min(8 * limits.multiprocessors, work.chunks), 1)
    return Launch(GROUP_ROWS[1], grid, 32 * warps, shared(warps, blocks if keep else warps), 1), keep


def _swiglu(stage: dict[str, int], work: Work, limits: GpuLimits) -> Launch | None:
    """The second stage's for SwiGLU without biases, with as many warps as have something to do at once.

    None where eight rows do not fit shared memory.
    """
    blocks = stage["in_features"] // BLOCK
    shared = blocks * _EIGHT_BYTES + 4 * 8

    def resident(warps: int) -> int:
        return min(_SWIGLU_WARPS // warps, limits.shared_memory // (shared + 1024))

    def busy(warps: int) -> tuple[float, int]:
        return resident(warps) * blocks / -(-blocks // warps), warps

    warps = max(range(1, min(_SWIGLU_WARPS, blocks) + 1), key=busy)
    if resident(warps) == 0:
        return None
    grid = (min(resident(warps) * limits.multiprocessors, 2 * work.chunks), 1)
    return Launch(SWIGLU_ROWS, grid, 32 * warps, shared, 1)


def _totals(blocks: int) -> int:
    """Bytes of the sums of a chunk's rows, in every 128-block."""
    return 4 * CHUNK_ROWS * blocks


def _even_warps(blocks: int, most: int = _ROW_THREADS // 32) -> int:
    """Warps of a thread block that goes over so many 128-blocks, such that none is idle in the last round."""
    return -(-blocks // -(-blocks // most))


def _sum(tokens: int, stage: dict[str, int], limits: GpuLimits) -> Launch:
    """The weighted sum: as many warps a token as give every multiprocessor some rounds of them."""
    split = min(stage["out_features"] // BLOCK, -(-_COMBINE_WARPS * limits.multiprocessors // tokens))
    grid = (-(-tokens * split * 32 // _COMBINE_ROWS_THREADS), 1)
    return Launch(COMBINE_ROWS, grid, _COMBINE_ROWS_THREADS, 0, 1)
