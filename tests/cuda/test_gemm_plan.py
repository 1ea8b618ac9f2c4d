"""The cut of a GEMM of up to 128 tokens: k blocks covered once, memory that fits, sums whose order no batch decides."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_exl3.cuda import compiler, gemm, gemm_plan
from vllm_exl3.cuda.compiler import CompileError, Instance, compile_instance, compiler_unavailable
from vllm_exl3.cuda.gemm_plan import (
    FEW_TOKENS,
    GEMM_TILES,
    INT8_GEMM_TILES,
    MOST_OF_TWO_KINDS,
    GemmPartition,
    choose_partition,
    k_blocks,
    plan_gemm,
    refusal,
)
from vllm_exl3.cuda.geometry import MAX_SHARDS, Arithmetic, GpuLimits
from vllm_exl3.cuda.prefill_arguments import PrefillArgs
from vllm_exl3.cuda.prefill_input import MOST_FEW_IN, ROTATE_FEW, plan_few_rows
from vllm_exl3.cuda.prefill_plan import GemmPlan
from vllm_exl3.cuda.survey import every_kind
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

H200 = GpuLimits("sm_90a", 132, 232448, ((2, 66), (4, 30), (8, 14)))
SMALL = GpuLimits("sm_90a", 16, 232448)
_GPUS = st.sampled_from([H200, SMALL, replace(H200, multiprocessors=1), replace(H200, multiprocessors=114)])
_KINDS = st.lists(st.sampled_from(every_kind()), min_size=1, max_size=2, unique=True)
_SHARDS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 70)), min_size=1, max_size=MAX_SHARDS)


def _layer(kinds: list[tuple[int, int]], shapes: list[tuple[int, int]], in_blocks: int) -> tuple[Shard, ...]:
    """Shards of (index of a kind, Hadamard blocks)."""
    return tuple(Shard(*kinds[i % len(kinds)], 128 * in_blocks, 128 * n, 0, 128 * n) for i, n in shapes)


def _work_tiles(arguments: PrefillArgs) -> list[list[tuple[int, int, int]]]:
    """(n tile, first k block, end) of every thread block's work tiles, as the kernel's GemmWorkTile gives them."""
    depth = arguments.in_features // 128
    begins = [r * arguments.range_k_blocks + min(r, arguments.longer_ranges) for r in range(arguments.ranges + 1)]
    walks = []
    for begin, end in itertools.pairwise(begins):
        walk, unit = [], begin
        while unit < end:
            strip, first = divmod(unit, depth)
            last = min(depth, first + end - unit)
            walk.append((strip, first, last))
            unit += last - first
        walks.append(walk)
    return walks


def _partials(plan: GemmPlan) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the scratch's partial sums, and the (begin, end) of each, as ``partial_tile`` of the kernel gives it."""
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    depth, size = arguments.in_features // 128, 4 * arguments.tile_rows * 128
    begins = [r * arguments.range_k_blocks + min(r, arguments.longer_ranges) for r in range(arguments.ranges)]
    found = []
    for block, walk in enumerate(_work_tiles(arguments)):
        for strip, first, end in walk:
            if end - first < depth:
                second = begins[block] < strip * depth
                for place in (0, 1):
                    at = (2 * (second * arguments.ranges + block) + place) * size
                    found.append((at, at + size))
    later = [at for at in plan.scratch_parts.values() if at > plan.scratch_parts["partials"]]
    return min([*later, plan.scratch]) - plan.scratch_parts["partials"], found


_CUTS = st.one_of(
    st.none(),
    st.tuples(st.just(False), st.integers(1, 200)),
    st.tuples(st.just(True), st.integers(1, 64)),
)


def _allowed(
    kinds: list[tuple[int, int]], shapes: list[tuple[int, int]], rows: int, int8: bool
) -> tuple[list[tuple[int, int]], int]:
    """Kinds and tokens that `plan_gemm` takes: int8 is for mul1, and two kinds leave registers for 64 tokens."""
    if int8:
        kinds = [(8, 2), (4, 2)][: len(kinds)]
    used = {kinds[kind % len(kinds)] for kind, _ in shapes}
    return kinds, rows if len(used) == 1 else min(rows, MOST_OF_TWO_KINDS)


@settings(max_examples=100, deadline=None)
@given(_KINDS, _SHARDS, st.integers(1, 60), st.integers(1, 128), _GPUS, _CUTS, st.booleans())
@example([(8, 2)], [(0, 32)], 32, 32, H200, None, False)
@example([(16, 2), (16, 0)], [(0, 1), (1, 3)] * 4, 1, 64, H200, None, False)
@example([(8, 2)], [(0, 224)], 64, 64, H200, None, True)
def test_every_unit_is_multiplied_once_and_has_room(
    kinds: list[tuple[int, int]],
    shapes: list[tuple[int, int]],
    in_blocks: int,
    rows: int,
    limits: GpuLimits,
    asked: tuple[bool, int] | None,
    int8: bool,
) -> None:
    kinds, rows = _allowed(kinds, shapes, rows, int8)
    layer, partition = _layer(kinds, shapes, in_blocks), None
    n_tiles = sum(-(-n // 2) for _, n in shapes)
    if asked is not None:
        equal, count = asked
        if equal:  # as many parts as divide k
            parts = max(parts for parts in range(1, in_blocks + 1) if in_blocks % parts == 0 and parts <= count)
            partition = GemmPartition(n_tiles * parts, True)
        else:
            partition = GemmPartition(min(count, n_tiles * in_blocks), False)
    plan = plan_gemm(layer, rows, 128 * in_blocks, limits, partition, int8=int8)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    tiles = INT8_GEMM_TILES if int8 else GEMM_TILES
    assert arguments.tile_rows == min(tile for tile in tiles if tile >= rows)
    assert arguments.n_tiles == n_tiles and k_blocks(layer) == n_tiles * in_blocks
    assert plan.grid == arguments.ranges and (partition is not None or plan.grid <= limits.multiprocessors)
    walks = _work_tiles(arguments)
    seen = Counter((strip, unit) for walk in walks for strip, first, end in walk for unit in range(first, end))
    assert len(seen) == n_tiles * in_blocks and set(seen.values()) == {1}
    assert all(walks), "a thread block without work, which the kernel does not expect"
    if arguments.split_k:
        assert len({walk[0][2] - walk[0][1] for walk in walks}) == 1 and {len(walk) for walk in walks} == {1}
    # Scratch: no part lies in another, or in what follows.
    room, parts = _partials(plan)
    assert all(end <= room for _, end in parts)
    assert len(set(parts)) == len(parts)
    sizes = {
        "activations": len(layer) * in_blocks * arguments.tile_rows * (128 if int8 else 256),
        "scales": 4 * len(layer) * rows,
        "offsets": 4 * len(layer) * rows * arguments.offset_parts,
        "arrivals": 4 * n_tiles,
    }
    at = plan.scratch_parts
    few = plan.transform.instance in ROTATE_FEW.values()
    assert arguments.offset_parts == (plan.transform.cluster if few else in_blocks)
    begins = [*sorted(at.values()), plan.scratch]
    assert set(at) == {*sizes, "partials"} and all(begin % 256 == 0 for begin in begins)
    assert all(begins[begins.index(at[name]) + 1] - at[name] >= size for name, size in sizes.items())
    # Shared memory: as gemm/gemm.cuh lays it out.
    assert plan.shared <= limits.shared_memory and 2 <= arguments.stages <= 12
    assert 24 + 2 * 8 * arguments.stages <= 256, "barriers in the words before the offsets"
    widest = max(half_bits for half_bits, _ in kinds if any(s.half_bits == half_bits for s in layer))
    assert arguments.weight_bytes >= 8 * (2 * 8 * 16 * widest + 32) and arguments.weight_bytes % 128 == 0


@pytest.mark.parametrize(("tile", "int8"), [*((t, False) for t in GEMM_TILES), *((t, True) for t in INT8_GEMM_TILES)])
def test_every_rate_has_a_ring_of_two_units(tile: int, int8: bool) -> None:
    """Or the engine could not start: on Hopper nothing else is asked before kernels are compiled."""
    for kind in every_kind():
        if int8 and not (kind[1] == Codebook.MUL1 and kind[0] <= 8):
            continue
        for other in (None, (8 if int8 else 16, 2)):
            if other not in (None, kind) and tile > MOST_OF_TWO_KINDS:
                continue
            shapes = [(0, 8), (1, 8)] if other not in (None, kind) else [(0, 8)]
            layer = _layer([kind, other] if other not in (None, kind) else [kind], shapes, 32)  # type: ignore[list-item]
            plan = plan_gemm(layer, tile, 4096, H200, int8=int8)
            arguments = PrefillArgs.from_buffer_copy(plan.arguments)
            assert arguments.stages >= 2 and plan.shared <= H200.shared_memory, (kind, other)
            assert arguments.tile_rows == tile


@given(st.integers(1, 600), st.integers(1, 240), _GPUS, st.booleans())
def test_cuts_fill_the_gpu_and_are_not_modelled_slower_than_others(
    n_tiles: int, depth: int, limits: GpuLimits, many: bool
) -> None:
    partition = choose_partition(n_tiles, depth, limits, many=many)
    assert 1 <= partition.blocks <= min(limits.multiprocessors, n_tiles * depth)
    if partition.split_k:
        assert (
            partition.blocks % n_tiles == 0
            and depth % (partition.blocks // n_tiles) == 0
            and partition.blocks >= n_tiles
        )
    else:
        assert partition.blocks == min(limits.multiprocessors, n_tiles * depth, 32 * n_tiles)


@settings(max_examples=60, deadline=None)
@given(_KINDS, _SHARDS, st.integers(1, 60), _GPUS)
def test_tokens_on_one_side_of_few_do_not_enter_a_cut(
    kinds: list[tuple[int, int]], shapes: list[tuple[int, int]], in_blocks: int, limits: GpuLimits
) -> None:
    """The order of sums has to be the same for every batch."""
    found: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    for rows, int8 in (
        (1, False),
        (9, False),
        (33, True),
        (48, False),
        (49, False),
        (64, True),
        (97, False),
        (128, True),
    ):
        some, few = _allowed(kinds, shapes, rows, int8)
        plan = plan_gemm(_layer(some, shapes, in_blocks), few, 128 * in_blocks, limits, int8=int8)
        passed = PrefillArgs.from_buffer_copy(plan.arguments)
        partition = (
            plan.grid,
            passed.ranges,
            passed.range_k_blocks,
            passed.longer_ranges,
            passed.split_k,
            passed.n_tiles,
        )
        found[few > FEW_TOKENS].add(partition)
    assert len(found[False]) == 1 and len(found[True]) <= 1


def test_shards_are_told_in_order() -> None:
    layer = (
        Shard(8, Codebook.MUL1, 1024, 384, 0, 384),
        Shard(6, Codebook.MCG, 1024, 128, 0, 100),
        Shard(8, Codebook.MUL1, 1024, 512, 64, 300),
    )
    plan = plan_gemm(layer, 20, 1000, H200)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    told = [
        (s.kind, s.half_bits, s.complements, s.first_n_tile, s.out_column, s.crop_start, s.crop_size)
        for s in arguments.shards[:3]
    ]
    assert told == [(1, 8, 1, 0, 0, 0, 384), (0, 6, 0, 2, 384, 0, 100), (1, 8, 1, 3, 484, 64, 300)]
    assert dict(plan.instance.macros) == {
        "INSTANCE_TOKENS": "24",
        "INSTANCE_KINDS": "GemmKind<6, 1, 2>, GemmKind<8, 2, 2>",
    }
    assert [(at.suh, at.svh) for at in plan.offsets] == [(0, 0), (1024, 384), (2048, 512)]
    assert [at.trellis for at in plan.offsets] == [0, 1024 * 384 // 4, 1024 * 384 // 4 + 1024 * 128 * 3 // 16]
    assert (arguments.in_width, arguments.in_features, arguments.shard_count) == (1000, 1024, 3)


_WIDE = Shard(8, 2, 2048, 512, 0, 512)
_ONE = Shard(8, 2, 1024, 512, 0, 512)


@pytest.mark.parametrize(
    ("layer", "limits", "said"),
    [
        ((_ONE,), GpuLimits("sm_80", 108, 166912), "sm_80 has no wgmma"),
        ((_ONE,), GpuLimits("sm_100a", 148, 232448), "sm_100a has no wgmma"),
        ((_ONE, _WIDE), H200, r"shards of \[1024, 2048\] inputs, expected one width"),
        (tuple(replace(_ONE, half_bits=bits) for bits in (4, 6, 8)), H200, "shards of 3 kinds, expected at most 2"),
    ],
)
def test_what_is_refused_is_named(layer: tuple[Shard, ...], limits: GpuLimits, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_gemm(layer, 20, 1024, limits)
    for int8 in (False, True):
        assert refusal(layer, limits, int8=int8) is not None
        assert not gemm.served_rows(layer, limits, int8=int8)
    assert gemm.instances(layer, limits) == []


def test_rows_too_wide_to_be_rounded_are_refused() -> None:
    """A row that no cluster holds; with fp16 another kernel rotates it."""
    for width in (MOST_FEW_IN, MOST_FEW_IN + 128):
        layer = (replace(_ONE, in_features=width),)
        assert refusal(layer, H200) is None
        assert (refusal(layer, H200, int8=True) is None) == (width == MOST_FEW_IN)
    with pytest.raises(ValueError, match="32896 inputs, expected at most 32768 where they are rounded to int8"):
        plan_gemm(layer, 20, width, H200, int8=True)


def test_int8_says_so_to_the_kernels() -> None:
    plan = plan_gemm((_ONE,), 20, 1024, H200, int8=True)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    assert dict(plan.instance.macros) == {"INSTANCE_TOKENS": "24", "INSTANCE_KINDS": "GemmKind<8, 2, 3>"}
    assert plan.transform.instance == ROTATE_FEW[1, True] and arguments.shards[0].complements == 0


def test_too_little_shared_memory_is_named() -> None:
    with pytest.raises(ValueError, match=r"100000 bytes of shared memory hold no two k blocks of \[\(16, 2\)\]"):
        plan_gemm((replace(_ONE, half_bits=16),), 64, 1024, replace(H200, shared_memory=100000))


@given(st.integers(1, 128), st.integers(1, 300), st.booleans())
def test_few_rows_have_a_cluster_each(rows: int, in_blocks: int, int8: bool) -> None:
    partition = plan_few_rows(rows, 128 * in_blocks, int8=int8)
    if in_blocks > MOST_FEW_IN // 128:
        assert partition is None
        return
    assert partition is not None
    ((transforms, rounds),) = (key for key, instance in ROTATE_FEW.items() if instance == partition.instance)
    assert rounds == int8
    assert partition.grid == (rows * partition.cluster, 1) and partition.block_rows == 1 and partition.shared == 0
    assert partition.threads == 256 and partition.cluster in (1, 2, 4, 8)
    warps = 8 * partition.cluster
    assert warps * transforms >= in_blocks
    assert partition.cluster == 1 or warps // 2 < in_blocks, (
        "half as many blocks would give every warp a 128-block, too"
    )
    assert transforms == 1 or partition.cluster == 8
    alone = plan_few_rows(1, 128 * in_blocks, int8=int8)
    assert alone is not None and alone.cluster == partition.cluster, "it decides the order of a sum, which no batch may"


def test_inputs_too_wide_for_a_cluster_are_rotated_by_another_kernel() -> None:
    width = MOST_FEW_IN + 128
    plan = plan_gemm((replace(_ONE, in_features=width),), 64, width, H200)
    assert plan.transform.instance.source == "prefill/transform.cu"
    assert plan_gemm((_ONE,), 64, 1024, H200).transform.instance.source == "gemm/rotate.cu"


@pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))
def test_sizes_mirror_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host reckons with of shared memory is what the kernel takes."""
    lines = [
        '#include "gemm/gemm.cuh"',
        f"static_assert(GEMM_BARRIER_BYTES >= 24 + 16 * {gemm_plan._MOST_STAGES});",
    ]
    for tile in {*GEMM_TILES, *INT8_GEMM_TILES}:
        lines.append(f"static_assert(gemm_staging_bytes<{tile}> == {gemm_plan._staging(tile)});")
    for arithmetic, size in ((Arithmetic.HALF, 256), (Arithmetic.BYTE, 128)):
        lines.append(f"static_assert(token_bytes<GemmKind<8, 2, {int(arithmetic)}>> == {size});")
    for half_bits, codebook in every_kind():
        words = f"4 * GemmKind<{half_bits}, {codebook}, 2>::Window::tile_words"
        lines.append(f"static_assert({words} == {16 * half_bits});")
    sources = {**compiler.kernel_sources(), "sizes.cu": "\n".join(lines)}
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    compile_instance(Instance("sizes.cu", ""), "sm_90a")
    sources["sizes.cu"] += "\nstatic_assert(GEMM_CONSUMER_THREADS == 513);"
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_instance(Instance("sizes.cu", ""), "sm_90a")
