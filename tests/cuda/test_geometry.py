"""The launch geometry: structures that mirror the device's, ranges that cover the work, memory that fits."""

import ctypes
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_exl3.cuda.compiler import kernel_sources
from vllm_exl3.cuda.geometry import Form, GpuLimits, LinearArgs, LinearPlan, ShardArgs
from vllm_exl3.cuda.plan import plan_linear
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

GPUS = {
    "h200": GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14))),
    "a100": GpuLimits("sm_80", 108, 166912),
    "rtx3090": GpuLimits("sm_86", 82, 101376),
    "rtx5090": GpuLimits("sm_120a", 170, 101376),
}
FORMS = (Form(True, 4), Form(True, 8), Form(False, 8), Form(False, 16))
_SIZES = {"u32": 4, "i64": 8}


@pytest.mark.parametrize("structure", [ShardArgs, LinearArgs])
def test_structures_mirror_the_device(structure: type[ctypes.Structure]) -> None:
    source = kernel_sources()["problem.cuh"]
    body = re.search(rf"struct {structure.__name__} {{(.*?)^}};", source, re.S | re.M)
    assert body is not None
    found = []
    for kind, name in re.findall(r"^\s+(.*?)\s*\b(\w+)(?:\[MAX_SHARDS\])?;", re.sub(r"//.*", "", body[1]), re.M):
        size = ctypes.sizeof(ShardArgs) * 8 if kind == "ShardArgs" else 8 if kind.endswith("*") else _SIZES[kind]
        found.append((name, size))
    assert found == [(name, ctypes.sizeof(kind)) for name, kind in structure._fields_]


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(AttributeError):
        LinearArgs().no_such_field = 1  # type: ignore[attr-defined]


def _arguments(plan: LinearPlan) -> LinearArgs:
    return LinearArgs.from_buffer_copy(plan.arguments)


def _kind(half_bits: int, codebook: Codebook, blocks: int) -> Shard:
    whole = half_bits if codebook == Codebook.MUL1 else half_bits + half_bits % 2
    return Shard(whole, codebook, 0, blocks * 128, 0, blocks * 128)


_shard = st.builds(
    _kind, st.sampled_from([2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]), st.sampled_from(list(Codebook)), st.integers(1, 60)
)


@given(
    st.lists(_shard, min_size=1, max_size=8),
    st.integers(1, 120),
    st.integers(1, 40),
    st.sampled_from(FORMS),
    st.sampled_from(sorted(GPUS)),
)
def test_plans(shapes: list[Shard], in_blocks: int, rows: int, form: Form, gpu: str) -> None:
    shards = tuple(Shard(s.half_bits, s.codebook, in_blocks * 128, s.out_features, 0, s.out_features) for s in shapes)
    limits = GPUS[gpu]
    for planes in (None, False, True):
        plan = plan_linear(shards, rows, in_blocks * 128, form, limits, planes)
        arguments = _arguments(plan)
        blocks, row_tiles = plan.grid
        units = sum(s.out_features // 128 * in_blocks * 2 for s in shards)
        assert blocks * arguments.range_units + arguments.longer_ranges == units
        strips = sum(s.out_features // 128 for s in shards)
        assert blocks <= max(limits.multiprocessors, strips) and row_tiles * form.tile_rows >= rows
        assert plan.cluster == 1 or blocks == strips * plan.cluster
        assert plan.shared <= limits.shared_memory
        assert arguments.ring_units in (1, 2)
        assert (arguments.activation_stride == 0) == (plan.transform_grid is None)
        if plan.transform_grid is None:
            assert arguments.plane_units >= min(in_blocks * 2, -(-units // blocks))
        ends = [*sorted(plan.scratch_parts.values())[1:], plan.scratch]
        assert all(end > start for start, end in zip(sorted(plan.scratch_parts.values()), ends, strict=True))


@given(
    st.integers(1, 200),
    st.integers(1, 40),
    st.sampled_from(FORMS),
    st.sampled_from([0, 1]),
    st.sampled_from(sorted(GPUS)),
)
def test_sums_are_ordered_alike_for_every_batch_of_a_class(
    columns: int, rows: int, form: Form, codebook: int, gpu: str
) -> None:
    """What decides the order of fp32 sums must not depend on the number of rows or on where the input is rotated."""
    shards = (Shard(8, codebook, 1024, columns * 128, 0, columns * 128),)
    plans = [
        plan_linear(shards, count, 1000, Form(form.identity, tile), GPUS[gpu], planes)
        for count in (1, rows)
        for planes in (False, True)
        for tile in ((4, 8) if form.identity else (8, 16))
    ]
    assert len({(plan.grid[0], plan.threads, _arguments(plan).range_units) for plan in plans}) == 1


def test_wide_forms_are_cut_alike() -> None:
    shards = (Shard(7, 2, 1024, 896, 0, 896),)
    plans = [
        plan_linear(shards, rows, 1024, Form(False, tile), GPUS["h200"]) for tile in (32, 64, 128) for rows in (17, 128)
    ]
    assert len({(plan.grid[0], _arguments(plan).range_units) for plan in plans}) == 1
    assert all(plan.shared <= GPUS["h200"].shared_memory and _arguments(plan).ring_units >= 3 for plan in plans)
    with pytest.raises(ValueError, match="wgmma"):
        plan_linear(shards, 32, 1024, Form(False, 32), GPUS["rtx5090"])


@pytest.mark.parametrize(
    ("shard", "width"),
    [
        (Shard(8, 2, 120, 128, 0, 128), 64),
        (Shard(8, 2, 128, 100, 0, 100), 64),
        (Shard(8, 2, 128, 128, 0, 129), 64),
        (Shard(8, 2, 128, 128, -1, 10), 64),
        (Shard(8, 2, 128, 128, 0, 128), 129),
    ],
)
def test_impossible_shards_are_refused(shard: Shard, width: int) -> None:
    with pytest.raises(ValueError, match="shard 0"):
        plan_linear((shard,), 1, width, FORMS[0], GPUS["h200"])
