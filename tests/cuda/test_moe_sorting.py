"""The lists that MoE launches share, made on the host: slots by expert, row blocks, chunks, work by kind."""

import ctypes
import shutil

import numpy as np
import pytest
import torch

from tests.cuda.host_kernels import HostKernels
from tests.cuda.moe_host import H200, IDENTITY, MIXED, NUMBERS, UNIFORM, WIDE, Memory, arguments_of, launch_alone, read
from tests.ops.moe_layers import random_layer, random_routing
from vllm_exl3.cuda.moe_geometry import Layer, MoeArgs
from vllm_exl3.cuda.moe_plan import COUNT, ROUTE, ROWS, SCHEDULE, plan_moe
from vllm_exl3.ops.experts import pack_table, projection_kinds
from vllm_exl3.pack.stored import Codebook

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 10), (17, 7), (43, 3), (128, 1)])
def test_slots_by_row_blocks_where_they_are_few_or_many(moe_library: HostKernels, tokens: int, top_k: int) -> None:
    """Both ways of sorting give experts in order, each expert's slots in order, in as few row blocks as fit."""
    experts, top_most = 11, 4
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    ids[ids == 5] = 3  # an expert without rows, and one with many
    layer = random_layer(experts, 128, 128, UNIFORM)
    shape = Layer(tuple((p, 8, Codebook.MUL1) for p in range(3)), experts, experts, top_k, 128, 128)
    plan, memory = plan_moe(shape, tokens, IDENTITY, 2, H200), Memory()
    args = arguments_of(memory, layer, plan, pack_table(layer.projections), False)
    args.x, args.x_type, args.ids = memory.place(np.ones((tokens, 128), np.float32)), 2, memory.place(ids.numpy())
    launch_alone(moe_library, args, plan, ROWS)

    flat = ids.numpy().ravel()
    here, counts = int((flat >= 0).sum()), np.bincount(flat[flat >= 0], minlength=experts)
    assert (read(args.sorted_slots, here) == np.argsort(np.where(flat >= 0, flat, experts), kind="stable")[:here]).all()
    listed = read(args.blocks, 4 * read(args.list_sizes, 1)[0]).reshape(-1, 4)
    most = np.where(counts > 2, top_most, 2)
    assert (listed[:, 0] == np.repeat(np.arange(experts), -(-counts // most))).all()
    assert (np.bincount(listed[:, 0], listed[:, 2], experts) == counts).all()
    assert (listed[:, 1] == np.cumsum([0, *listed[:-1, 2]])).all()
    assert ((listed[:, 2] > 0) & (listed[:, 2] <= most[listed[:, 0]])).all()


@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_work_is_sorted_by_kind(moe_library: HostKernels, tokens: int) -> None:
    """Every row block comes with every projection of a stage, once; kinds of more bits come first."""
    layer = random_layer(5, 128, 128, MIXED)
    kinds, ids = projection_kinds(layer.projections), random_routing(tokens, 5, 3)[1]
    shape = Layer(tuple(zip(kinds[::3], kinds[1::3], kinds[2::3], strict=True)), 5, 5, 3, 128, 128)
    plan, memory = plan_moe(shape, tokens, WIDE, 32, H200), Memory()
    args = arguments_of(memory, layer, plan, pack_table(layer.projections), False)
    args.x, args.x_type, args.ids = memory.place(np.ones((tokens, 128), np.float32)), 2, memory.place(ids.numpy())
    launch_alone(moe_library, args, plan, ROUTE, SCHEDULE)
    listed = read(args.blocks, 4 * read(args.list_sizes, 1)[0]).reshape(-1, 4)
    for stage, parts in zip(args.stages, ((0, 1), (2,)), strict=True):
        schedule = read(stage.schedule, 4 * len(parts) * len(listed)).reshape(-1, 4)
        found = [(*turn[:3], turn[3] & 255) for turn in schedule.tolist()]
        assert sorted(found) == sorted((*block[:3], i) for block in listed.tolist() for i in range(len(parts)))
        own = [layer.projections[expert][parts[index]] for expert, _, _, index in found]
        assert [turn >> 8 for turn in schedule[:, 3].tolist()] == [part.half_bits | part.codebook << 8 for part in own]
        order = [(part.half_bits, part.codebook) for part in own]
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("tokens", [90, 700, 1500])
def test_slots_are_sorted_by_one_block_or_several(moe_library: HostKernels, tokens: int) -> None:
    experts, top_k = 7, 3
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    ids[ids == 5] = 0  # an expert without rows
    shape = Layer(
        ((0, 8, Codebook.MUL1), (1, 8, Codebook.MUL1), (2, 8, Codebook.MUL1)), experts, experts, top_k, 128, 128
    )
    plan, memory = plan_moe(shape, tokens, WIDE, 32, H200), Memory()
    args = MoeArgs(ids=memory.place(ids.numpy()), **plan.values)
    plan.scratch.place(args, memory.place(np.full(plan.scratch.size, 0xFF, np.uint8)))
    sorting = [launch for launch in plan.launches if launch.instance in (COUNT, ROUTE)]
    blocks = sorting[-1].grid[0]
    assert (blocks > 1) == (len(sorting) > 1) == (tokens > 90)
    for launch in sorting:  # without the blocks that look at x and at scales
        number = NUMBERS[launch.instance]
        moe_library.run_kernel(ctypes.byref(args), number, 0, blocks, 1, launch.threads, launch.shared)

    def found(part: str, count: int) -> np.ndarray:
        return read(getattr(args, part), count)

    flat, starts, places = ids.numpy().ravel(), found("starts", experts + 1), found("slot_positions", ids.numel())
    counts = np.bincount(flat[flat >= 0], minlength=experts)
    assert (starts == np.concatenate([[0], np.cumsum(-(-counts // 8) * 8)])).all()
    for expert in range(experts):
        mine = np.flatnonzero(flat == expert)
        assert (places[mine] == starts[expert] + np.arange(len(mine))).all()
        assert (found("sorted_slots", starts[-1])[places[mine]] == mine).all()
    assert (places[flat < 0] == -1).all()
    for size, part, most in zip(found("list_sizes", 2), ("blocks", "chunks"), (64, 16), strict=True):
        listed = found(part, 4 * size).reshape(size, 4)
        assert (np.bincount(listed[:, 0], listed[:, 2], experts) == counts).all()
        assert listed[:, 2].max() <= most
        assert (listed[:, 1] % 8 == 0).all()
        ends = listed[:, 1] + listed[:, 2]
        if part == "blocks":
            assert all(ends[i] == listed[i + 1, 1] for i in range(size - 1) if listed[i, 0] == listed[i + 1, 0])
        else:  # piece by piece
            order = [((first - starts[expert]) // most, expert) for expert, first, _, _ in listed]
            assert order == sorted(order)
            assert len(set(order)) == size
