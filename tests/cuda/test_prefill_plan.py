"""The partition of a prefill launch: structures, k blocks covered once, memory that fits, no cliffs."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.prefill import window_rows
from vllm_exl3.cuda.prefill_input import MOST_INT8_IN, plan_quantize
from vllm_exl3.cuda.prefill_partition import choose_partition
from vllm_exl3.cuda.prefill_plan import MMA_TILES, TILES, PrefillArgs, kernel, plan_prefill
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

H200 = GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14)))
SMALL = GpuLimits("sm_90a", 16, 232448, ((2, 8),))


def _work_tiles(arguments: PrefillArgs, clusters: int) -> list[list[tuple[int, int, int]]]:
    """(tile, first k block, end) of every cluster's work tiles, in the order of PrefillScheduler."""
    depth = arguments.in_features // 64
    begin = [r * arguments.range_k_blocks + min(r, arguments.longer_ranges) for r in range(arguments.ranges + 1)]
    walks = []
    for cluster in range(clusters):
        walk = [(tile, 0, depth) for tile in range(cluster, arguments.whole_tiles, clusters)]
        unit, end = (begin[cluster], begin[cluster + 1]) if cluster < arguments.ranges else (0, 0)
        while unit < end:
            tile, first = divmod(unit, depth)
            last = min(depth, first + end - unit)
            walk.append((arguments.whole_tiles + tile, first, last))
            unit += last - first
        walks.append(walk)
    return walks


_shards = st.lists(
    st.tuples(st.sampled_from([2, 5, 8, 16]), st.sampled_from(list(Codebook)), st.integers(1, 70)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    _shards, st.integers(1, 60), st.integers(1, 3000), st.sampled_from([*TILES, None]), st.sampled_from([H200, SMALL])
)
def test_every_unit_is_computed_once(
    shapes: list[tuple[int, Codebook, int]], in_blocks: int, rows: int, tokens: int | None, limits: GpuLimits
) -> None:
    shards = tuple(Shard(h, c, 128 * in_blocks, 128 * n, 0, 128 * n) for h, c, n in shapes)
    if not limits.warpgroups and tokens not in MMA_TILES:
        tokens = None
    plan = plan_prefill(shards, rows, 128 * in_blocks, limits, tokens)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    depth, clusters = 2 * in_blocks, plan.grid // plan.cluster
    used = kernel(arguments.tile_rows, limits)
    assert clusters <= used.clusters(limits) and plan.grid % plan.cluster == 0 and arguments.stages >= 2
    assert plan.shared * used.resident <= limits.shared_memory
    tiles = arguments.n_tiles * arguments.row_tiles
    assert arguments.n_tiles == sum(-(-n // used.n_blocks) for _, _, n in shapes)
    walks = _work_tiles(arguments, clusters)
    seen = Counter((tile, unit) for walk in walks for tile, first, end in walk for unit in range(first, end))
    assert len(seen) == tiles * depth and set(seen.values()) <= {1}
    for walk in walks:  # the two areas that a range has for its partial sums
        assert sum(end - first < depth for _, first, end in walk) <= 2
    partials = 2 * arguments.ranges * used.n_blocks * arguments.tile_rows * 256
    assert plan.scratch >= plan.scratch_parts["partials"] + partials
    assert arguments.n_blocks == used.n_blocks
    cut_tiles = tiles - arguments.whole_tiles
    ended = "arrivals" in plan.scratch_parts
    assert bool(arguments.ranges) == (cut_tiles > 0) == (ended or plan.finish is not None)
    if ended:
        assert plan.finish is None and used.reduces and arguments.tile_rows <= 128
        assert plan.scratch >= plan.scratch_parts["arrivals"] + 4 * cut_tiles * used.n_blocks
        assert all(len(walk) <= 1 or walk[-2][2] == depth for walk in walks)  # no cluster has parts of two tiles
    if plan.finish is not None:
        assert plan.finish[0] == cut_tiles * used.n_blocks
        assert plan.finish[1] * 64 >= arguments.tile_rows


def test_shards_have_one_width() -> None:
    shard, other = Shard(8, 2, 1024, 512, 0, 512), Shard(8, 2, 2048, 512, 0, 512)
    with pytest.raises(ValueError, match="expected one width"):
        plan_prefill((shard, other), 100, 1024, H200)


@pytest.mark.parametrize("int8", [False, True])
def test_a_gpu_that_holds_no_cluster_is_named(int8: bool) -> None:
    shard = Shard(8, 2, 1024, 512, 0, 512)
    with pytest.raises(ValueError, match="of 1 multiprocessor, expected 2 or more"):
        plan_prefill((shard,), 1000, 1024, GpuLimits("sm_90a", 1, 232448), int8=int8)
    plan = plan_prefill((shard,), 1000, 1024, GpuLimits("sm_90a", 2, 232448, ((2, 0),)), int8=int8)
    assert plan.grid == plan.cluster == 2
    assert plan_prefill((shard,), 1000, 1024, GpuLimits("sm_80", 1, 166912)).grid >= 1


@given(st.integers(1, 2000), st.integers(2, 500), st.sampled_from(TILES), st.sampled_from([1, 66, 132]), st.booleans())
def test_cutting_is_never_estimated_worse_than_whole_tiles(
    tiles: int, depth: int, tokens: int, clusters: int, ends: bool
) -> None:
    ends = ends and tokens <= 128
    chosen = choose_partition(tiles, depth, tokens, clusters, reduces=ends)
    assert not chosen.reduces or (ends and chosen.ranges % (tiles - chosen.whole_tiles) == 0)
    assert chosen.whole_tiles <= tiles and chosen.ranges <= clusters and 1 <= chosen.clusters <= clusters
    assert (chosen.ranges == 0) == (chosen.whole_tiles == tiles)
    assert chosen.cost >= tiles * depth / clusters  # a k block takes more than a cycle


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672)])
def test_time_grows_with_tokens_without_cliffs(shape: tuple[int, int]) -> None:
    """Neighbours of the grid 1…16384 and around every tile: at most the tokens' ratio or one tile more, hardly less."""
    shard = Shard(8, 2, *shape, 0, shape[1])
    grid = sorted({r for p in range(6, 13) for r in (2**p - 1, 2**p, 2**p + 1, 3 * 2**p)})
    costs = []
    for rows in grid:
        plan = plan_prefill((shard,), rows, shape[0], H200)
        arguments = PrefillArgs.from_buffer_copy(plan.arguments)
        depth, tokens, used = shape[0] // 64, arguments.tile_rows, kernel(arguments.tile_rows, H200)
        time, step = (
            choose_partition(tiles, depth, tokens, used.clusters(H200), reduces=used.reduces).cost
            for tiles in (arguments.n_tiles * arguments.row_tiles, arguments.n_tiles)
        )
        costs.append((rows, time, step))
    for (m1, t1, _), (m2, t2, step) in itertools.pairwise(costs):
        assert t2 >= 0.9 * t1, (m1, m2)
        assert t2 <= max(1.1 * t1 * m2 / m1, t1 + step), (m1, m2)


@given(st.integers(1, 100_000), st.integers(1, 500), st.integers(1, 3), st.booleans())
def test_windows_are_few_and_even(rows: int, in_blocks: int, shards: int, int8: bool) -> None:
    layer = (Shard(8, 2, 128 * in_blocks, 128, 0, 128),) * shards
    step = window_rows(layer, rows, int8=int8)
    launches = -(-rows // step)
    row = (1 if int8 else 2) * 128 * in_blocks * shards
    assert step % 256 == 0 and row * step <= max(64 << 20, row * 256)
    assert rows - (launches - 1) * step > 0 and step - -(-rows // launches) < 256


@given(st.integers(1, 10_000), st.integers(1, MOST_INT8_IN // 128), st.integers(1, 3))
def test_rounded_rows_have_a_thread_a_unit(rows: int, in_blocks: int, shards: int) -> None:
    launch = plan_quantize(rows, 128 * in_blocks, shards)
    assert 0 <= launch.grid[0] * launch.block_rows - rows < launch.block_rows and launch.grid[1] == shards
    assert launch.block_rows * 2 * in_blocks <= launch.threads <= 512 and launch.threads % 32 == 0
    assert launch.block_rows * 128 * in_blocks * 2 < launch.shared <= H200.shared_memory
