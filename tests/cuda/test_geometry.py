"""The launch geometry: ranges that cover the work, memory that fits."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_exl3.cuda import linear
from vllm_exl3.cuda.geometry import Form, GpuLimits, LinearArgs, LinearPlan
from vllm_exl3.cuda.narrow import NARROW_32, NarrowArgs, plan_narrow
from vllm_exl3.cuda.narrow_memory import most_columns
from vllm_exl3.cuda.narrow_partition import NarrowPartition as Partition
from vllm_exl3.cuda.wide import plan_wide
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook

GPUS = {
    "h200": GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14))),
    "a100": GpuLimits("sm_80", 108, 166912),
    "rtx3090": GpuLimits("sm_86", 82, 101376),
    "rtx5090": GpuLimits("sm_120a", 170, 101376),
}
FORMS = (Form(True, 4), Form(True, 8), Form(False, 8), Form(False, 16))


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(AttributeError):
        LinearArgs().no_such_field = 1  # type: ignore[attr-defined]


def _arguments(plan: LinearPlan) -> NarrowArgs:
    return NarrowArgs.from_buffer_copy(plan.arguments)


def _ranges(plan: LinearPlan) -> list[tuple[int, int]]:
    """Every block's k blocks, as narrow/arguments.cuh partitions them."""
    arguments, found = _arguments(plan), []
    for block in range(plan.grid[0]):
        if arguments.splits:
            n_tile, part = divmod(block, arguments.splits)
            first = n_tile * arguments.range_k_blocks
            found.append(
                (
                    first + part * arguments.range_k_blocks // arguments.splits,
                    first + (part + 1) * arguments.range_k_blocks // arguments.splits,
                )
            )
        else:
            first = block * arguments.range_k_blocks + min(block, arguments.longer_ranges)
            found.append((first, first + arguments.range_k_blocks + (block < arguments.longer_ranges)))
    return found


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
    for rotated in (None, False, True):
        plan = plan_narrow(shards, rows, in_blocks * 128, form, limits, rotated=rotated)
        arguments = _arguments(plan)
        channels = 256 * int(dict(plan.instance.macros)["INSTANCE_COLUMNS"])
        n_tiles = sum(-(-s.out_features // channels) for s in shards)
        ranges = _ranges(plan)
        assert ranges[0][0] == 0 and ranges[-1][1] == n_tiles * in_blocks
        assert all(start < end for start, end in ranges)
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
        assert arguments.n_tiles == n_tiles and plan.grid[1] * form.tile_rows >= rows
        assert len(ranges) <= max(limits.multiprocessors, n_tiles)
        assert plan.shared <= limits.shared_memory - 128
        assert 1 <= arguments.cached_k_blocks <= max(end - start for start, end in ranges)
        assert (plan.transform is None) == ("records" not in plan.scratch_parts)
        clustered = plan.cluster > 1
        assert (plan.cluster, plan.grid[0] % plan.cluster) == (arguments.splits if clustered else 1, 0)
        assert not clustered or plan.grid[0] <= plan.cluster * dict(limits.clusters)[plan.cluster]
        assert ("partials" in plan.scratch_parts) != clustered
        assert ("counters" in plan.scratch_parts) == (plan.grid[1] > 1 and not clustered)
        assert plan.counters == (0 if clustered or plan.grid[1] > 1 else n_tiles)
        starts = sorted(plan.scratch_parts.values())
        assert all(end > start for start, end in zip(starts, [*starts[1:], plan.scratch], strict=False))
        assert arguments.record_bytes % 16 == 0 and arguments.cache_buffers in (1, 2)
        # The kernel waits for a fetch of activations only where so many fetches of weights have followed it.
        assert arguments.cache_buffers == 1 or arguments.cached_k_blocks >= int(
            dict(plan.instance.macros)["INSTANCE_STAGES"]
        )


def _block_of_item(arguments: NarrowArgs, k_block: int) -> int:
    """As narrow/arguments.cuh finds it where the whole list is cut."""
    longer = arguments.longer_ranges * (arguments.range_k_blocks + 1)
    if k_block < longer:
        return k_block // (arguments.range_k_blocks + 1)
    return arguments.longer_ranges + (k_block - longer) // arguments.range_k_blocks


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8), st.sampled_from(sorted(GPUS))
)
def test_splits_of_n_tiles(shapes: list[tuple[int, int]], gpu: str) -> None:
    """Every partial has a place of its own, an n tile's lie together, and each of its blocks knows which they are."""
    shards = tuple(Shard(8, 2, depth * 128, blocks * 128, 0, blocks * 128) for blocks, depth in shapes)
    plan = plan_narrow(shards, 1, 128, FORMS[0], GPUS[gpu])
    arguments, channels = _arguments(plan), 256 * int(dict(plan.instance.macros)["INSTANCE_COLUMNS"])
    n_tiles, first = [], 0
    for shard in shards:
        depth = shard.in_features // 128
        for _ in range(-(-shard.out_features // channels)):
            n_tiles.append(range(first, first + depth))
            first += depth
    partials = []
    for index, n_tile in enumerate(n_tiles):
        of = [b for b, (start, end) in enumerate(_ranges(plan)) if start < n_tile.stop and end > n_tile.start]
        if arguments.splits:
            assert (of[0], len(of)) == (of[-1] - of[-1] % arguments.splits, arguments.splits)
        else:
            assert (of[0], of[-1]) == (_block_of_item(arguments, n_tile[0]), _block_of_item(arguments, n_tile[-1]))
        assert of == list(range(of[0], of[-1] + 1))
        partials += [(block + index, block, len(of)) for block in of]
    assert len({partial for partial, _, _ in partials}) == len(partials) <= len(n_tiles) + plan.grid[0]
    assert max(partial for partial, _, _ in partials) < len(n_tiles) + plan.grid[0]
    shared = Counter(block for _, block, blocks in partials if blocks > 1)
    assert max(shared.values(), default=0) <= 2  # what the kernel remembers


@given(
    st.integers(1, 200),
    st.integers(1, 40),
    st.sampled_from(FORMS),
    st.sampled_from([0, 1, 2]),
    st.sampled_from(sorted(GPUS)),
)
def test_sums_are_ordered_alike_for_every_batch_of_a_class(
    columns: int, rows: int, form: Form, codebook: int, gpu: str
) -> None:
    """What decides the order of fp32 sums must not depend on the number of rows or on where the input is rotated."""
    shards = (Shard(8, codebook, 1024, columns * 128, 0, columns * 128),)
    tiles = (form.tile_rows,) if form.identity else (8, 16)
    plans = [
        plan_narrow(shards, count, 1000, Form(form.identity, tile), GPUS[gpu], rotated=rotated)
        for count in (1, rows)
        for rotated in (False, True)
        for tile in tiles
    ]
    assert len({(tuple(_ranges(plan)), dict(plan.instance.macros)["INSTANCE_COLUMNS"]) for plan in plans}) == 1


@pytest.mark.parametrize(
    ("kinds", "columns"),
    [
        ({(8, 2)}, 2),
        ({(6, 2), (8, 2)}, 2),
        ({(12, 2)}, 2),
        ({(8, 2), (12, 2)}, 1),
        ({(10, 2), (12, 2)}, 1),
        ({(16, 2)}, 1),
        ({(8, 1)}, 1),
    ],
    ids=str,
)
def test_tile_columns_that_decoded_weights_leave_registers_for(kinds: set[tuple[int, int]], columns: int) -> None:
    assert most_columns(Form(False, 16), sorted(kinds), GPUS["h200"]) == columns
    assert most_columns(Form(False, 16), sorted(kinds), GPUS["a100"]) == 1


def test_blocks_of_a_strip_form_clusters_where_all_run_at_once() -> None:
    shard = Shard(8, 2, 4096, 14336, 0, 14336)
    found = [
        plan_narrow((shard,), 1, 4096, Form(True, 4), GpuLimits("sm_90a", 132, 232448, clusters))
        for clusters in (((4, 28),), ((4, 27),))
    ]
    assert [(plan.cluster, plan.counters) for plan in found] == [(4, 0), (1, found[1].counters)]
    assert found[1].counters and not found[0].scratch


@pytest.mark.parametrize(("shape", "blocks"), [((4096, 4096), 128), ((14336, 4096), 128), ((8192, 28672), 132)])
def test_large_layers_fill_an_h200(shape: tuple[int, int], blocks: int) -> None:
    plan = plan_narrow((Shard(8, 2, *shape, 0, shape[1]),), 1, shape[0], Form(True, 4), GPUS["h200"])
    assert plan.grid == (blocks, 1)


def _served(shards: tuple[Shard, ...], rows: int, limits: GpuLimits, one_class: bool) -> LinearPlan:
    """The launch that serves ``rows`` tokens where the prefill kernel does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", str(int(one_class)))
        form = linear.choose_form(shards, rows, limits)
    return linear.plan(shards, rows, shards[0].in_features, form, limits)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(_shard, min_size=1, max_size=4),
    st.integers(1, 240),
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.sampled_from(sorted(GPUS)),
    st.booleans(),
)
def test_every_kernel_is_prepared(
    shapes: list[Shard], in_blocks: int, batches: list[int], gpu: str, one_class: bool
) -> None:
    """Nothing is compiled while requests wait."""
    shards = tuple(Shard(s.half_bits, s.codebook, in_blocks * 128, s.out_features, 0, s.out_features) for s in shapes)
    limits = GPUS[gpu]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", str(int(one_class)))
        prepared = set(linear.instances(tuple(pack_shards(shards)), in_blocks * 128, limits))
    for rows in (*range(1, 34), *batches):
        assert prepared.issuperset(_served(shards, rows, limits, one_class).instances), rows


@pytest.mark.parametrize(
    ("shapes", "tokens"),
    [
        (((4096, 4096),), range(17, 33)),
        (((4096, 6144),), range(17, 33)),
        (((8192, 4096),), range(17, 29)),
        (((8192, 28672),), ()),
        (((4096, 1024), (4096, 1024), (4096, 4096)), range(17, 33)),
        (((1024, 1024),) * 3, ()),
        (((4096, 1024), (2048, 1024)), range(17, 33)),
    ],
)
def test_the_narrow_kernel_serves_more_tokens_of_small_layers(
    shapes: tuple[tuple[int, int], ...], tokens: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a block has little to rotate, and two kinds of shards at most."""
    bits = (8, 8, 10) if shapes[0][0] > 1024 else (8, 10, 12)
    shards = tuple(Shard(half_bits, 2, *shape, 0, shape[1]) for half_bits, shape in zip(bits, shapes, strict=False))
    served = {rows for rows in range(1, 200) if linear.choose_form(shards, rows, GPUS["h200"]).narrow}
    assert served == set(tokens)
    assert not any(linear.choose_form(shards, rows, GPUS["a100"]).narrow for rows in range(1, 40))
    for rows in served:
        assert linear.plan(shards, rows, min(shapes)[0], NARROW_32, GPUS["h200"]).transform is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not any(linear.choose_form(shards, rows, GPUS["h200"]).narrow for rows in range(1, 200))


def test_wide_forms_are_cut_alike() -> None:
    shards = (Shard(7, 2, 1024, 896, 0, 896),)
    plans = [
        plan_wide(shards, rows, 1024, Form(False, tile), GPUS["h200"]) for tile in (32, 64, 128) for rows in (17, 128)
    ]
    arguments = [LinearArgs.from_buffer_copy(plan.arguments) for plan in plans]
    assert len({(plan.grid[0], values.range_k_blocks) for plan, values in zip(plans, arguments, strict=True)}) == 1
    assert all(plan.shared <= GPUS["h200"].shared_memory for plan in plans)
    assert all(values.pipeline_stages >= 3 for values in arguments)
    with pytest.raises(ValueError, match="wgmma"):
        plan_wide(shards, 32, 1024, Form(False, 32), GPUS["rtx5090"])


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
        plan_narrow((shard,), 1, width, FORMS[0], GPUS["h200"])


def test_lists_too_long_for_the_kernels_divisions_are_refused() -> None:
    longest = Shard(8, 2, 1 << 15, 256 * 2047, 0, 1)
    plan_narrow((longest,), 1, 128, FORMS[0], GPUS["h200"], Partition(1, 0, 132))
    over = Shard(8, 2, 1 << 15, 256 << 13, 0, 1)
    with pytest.raises(ValueError, match="k blocks"):
        plan_narrow((over,), 1, 128, FORMS[0], GPUS["h200"], Partition(1, 0, 132))
