"""The MoE kernels, all of them, compiled for the host and held against float64: what a GPU would run, thread by thread.

Barriers, bulk copies, tensor-core instructions and shared memory's limits are those of host/; how fast anything is, and
what is in flight when, only a GPU shows (tests/gpu).
"""

import ctypes
import math
import shutil

import numpy as np
import pytest
import torch

from tests.cuda.host_kernels import build
from tests.ops.moe_layers import MoELayer, random_layer, random_routing, swiglu
from vllm_exl3.cpu.quantize import encode
from vllm_exl3.cuda.binding import ELEMENTS
from vllm_exl3.cuda.moe_geometry import ACTIVATION_KINDS, Layer, MoeArgs, MoeForm, MoeStage
from vllm_exl3.cuda.moe_plan import COMBINE_ROWS_THREADS, TURN_THREADS, MoePlan, plan_moe
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.ops.activation import ACTIVATIONS, activate
from vllm_exl3.ops.experts import pack_table, projection_kinds, share_input_scales
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import Codebook

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

H200 = typical_limits("sm_90a")
IDENTITY, THIN, WIDE = MoeForm(True, 4), MoeForm(False, 32), MoeForm(False, 64)
WIDER, WIDEST = MoeForm(False, 128), MoeForm(False, 256)
ROUTE, ROWS, GROUP_ROWS, COMBINE, COMBINE_ROWS, COUNT = 0, 1, (2, 3), 4, 5, 6
GEMM = {IDENTITY: 7, THIN: 8, WIDE: 9, WIDEST: 10, WIDER: 11}
TURNS = 12
COMBINE_CHANNELS = 1024
"""Of a thread block of moe_combine.cu."""

BLOCKS = 2
"""Thread blocks of a GEMM: few, so that every block has several items."""

WIDEST_BLOCKS = 256
"""Hadamard blocks of an input of 32,768 channels, wider than any known model's."""

UNIFORM = [(4, Codebook.MUL1)]
MIXED = [(3, Codebook.MCG), (4, Codebook.MUL1), (2.5, Codebook.MUL1), (4, Codebook.MUL1), (3, Codebook.MCG)]
"""What host/moe.cpp knows."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(build("moe", tmp_path_factory.mktemp("moe"))))


class Memory:
    """Arrays at addresses that are multiples of 256, like a GPU's allocations; kept as long as this lives."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def place(self, values: np.ndarray) -> int:
        """Address of a copy."""
        raw = np.full(values.nbytes + 512, 0xFF, np.uint8)  # NaN, and slots that do not exist
        start = -raw.ctypes.data % 256
        raw[start : start + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).ravel()
        self._kept.append(raw)
        return raw.ctypes.data + start


def arguments_of(
    memory: Memory, layer: MoELayer, plan: MoePlan, table: torch.Tensor, form: MoeForm, on_input: bool
) -> MoeArgs:
    """What vllm_exl3.cuda.moe fills in, with addresses of this process."""
    stages = []
    for name, sizes in zip(("w13", "w2"), plan.stages, strict=True):
        tensors = {leaf: layer.tensors[f"{name}_{leaf}"] for leaf in ("trellis", "suh", "svh", "bias")}
        places = {leaf: memory.place(tensor.numpy()) for leaf, tensor in tensors.items() if tensor is not None}
        stages.append(MoeStage(**sizes, **places))
    alpha, beta, limit = layer.activation[1:]
    args = MoeArgs(
        stages=(MoeStage * 2)(*stages), table=memory.place(table.numpy()), out_type=2, wide_ids=0,
        x_stride=layer.hidden, out_stride=layer.hidden, weight_on_input=on_input, alpha=alpha, beta=beta, limit=limit,
        activation=ACTIVATION_KINDS.index(layer.activation[0]), **plan.values,
    )  # fmt: skip
    base, parts = memory.place(np.full(plan.scratch, 0xFF, np.uint8)), plan.parts
    for part in (
        "order",
        "places",
        "blocks",
        "chunks",
        "list_sizes",
        "totals",
        "row_largest",
        "scale_largest",
        "starts",
    ):
        setattr(args, part, base + parts[part])
    first, second = args.stages
    first.rows, first.out = base + parts["first_rows"], base + parts["hidden"]
    second.rows, second.out = base + parts["second_rows"], base + parts["first_rows"]
    first.turns, second.turns = base + parts["turns"], base + parts["turns"] + plan.turns
    for stage, before in ((first, 0), (second, first.projections)):
        stage.undo, stage.sums = (base + parts[part] + 4 * plan.fact_rows * before for part in ("undo", "sums"))
    return args


def run(
    library: ctypes.CDLL,
    layer: MoELayer,
    x: torch.Tensor,
    route: tuple[torch.Tensor, torch.Tensor],
    form: MoeForm,
    *,
    on_input: bool = False,
    table: torch.Tensor | None = None,
    fat_rows: int | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole op, launch by launch."""
    kinds = projection_kinds(layer.projections)
    experts, (tokens, top_k) = len(layer.projections), route[1].shape
    total = experts if expert_map is None else len(expert_map)
    shape = Layer(
        tuple(zip(kinds[::3], kinds[1::3], kinds[2::3], strict=True)),
        experts, total, top_k, layer.hidden, layer.intermediate,
    )  # fmt: skip
    fat_rows = form.tile_rows // 2 if fat_rows is None else fat_rows
    plan, memory = plan_moe(shape, tokens, form, fat_rows, H200), Memory()
    args = arguments_of(memory, layer, plan, pack_table(layer.projections) if table is None else table, form, on_input)
    out = np.full((tokens, layer.hidden), np.nan, np.float32)
    raw = x if x.dtype == torch.float32 else x.view(torch.int16)
    args.x, args.out, args.x_type = memory.place(raw.numpy()), out.ctypes.data, ELEMENTS[x.dtype]
    args.weights, args.ids = memory.place(route[0].numpy()), memory.place(route[1].numpy())
    if expert_map is not None:
        args.expert_map = memory.place(expert_map.numpy())
    mixed = len({kinds[i + 1 : i + 3][0] * 4 + kinds[i + 2] for i in range(0, len(kinds), 3)}) > 1

    def launch(kernel: int, grid: tuple[int, int], threads: int, shared: int) -> None:
        library.run_kernel(ctypes.byref(args), kernel, int(mixed), *grid, threads, shared)

    if plan.route is not None:
        blocks, rows, threads, shared = plan.route
        if blocks > 1:
            launch(COUNT, (blocks, 1), threads, 4 * experts)
        launch(ROUTE, (blocks, rows), threads, shared)
    if plan.turns:
        launch(TURNS, (2, 1), TURN_THREADS, 0)
    for index, stage in enumerate(args.stages):
        args.stage = index
        if plan.route is not None:
            launch(GROUP_ROWS[index], (BLOCKS, 1), plan.group_threads[index], plan.group_shared[index])
        else:
            launch(ROWS, (args.slots + 1 - index, stage.projections), 256, plan.rows_shared[index])
        threads = plan.gemm_threads[index] if form.wide else 256  # the host builds one of two numbers of warps
        launch(GEMM[form], (BLOCKS, 1), threads, plan.gemm_shared)
    if plan.route is not None:
        launch(COMBINE_ROWS, (plan.combine_grid, 1), COMBINE_ROWS_THREADS, 0)
    else:
        launch(COMBINE, (tokens, -(-layer.hidden // COMBINE_CHANNELS)), 256, 0)
    return torch.from_numpy(out)


def read(address: int, count: int) -> np.ndarray:
    """Words that kernels wrote."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).copy()


def error(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - expected) / np.linalg.norm(expected))


def bound(form: MoeForm) -> float:
    """Of a layer: three linears within 5e-4 each."""
    return 1e-3 if form.wide else 7e-4


OAI = {"bias": True, "activation": ("swiglu", 1.702, 1.0, 7.0), "function": swiglu(1.702, 1.0, 7.0)}
RELU2 = {
    "gated": False,
    "activation": ("relu2_ungated", 1.0, 0.0, math.inf),
    "function": lambda _, up: np.maximum(up, 0) ** 2,
}

CASES = {
    "decode": (IDENTITY, 3, 256, 256, UNIFORM, 5, 2, {}),
    "decode, mixed, biases": (IDENTITY, 3, 200, 256, MIXED, 6, 2, OAI),
    "prefill": (WIDE, 3, 256, 256, UNIFORM, 9, 2, {}),
    "prefill, thin": (THIN, 3, 256, 384, UNIFORM, 60, 2, {}),
    "prefill, more than eight choices": (THIN, 11, 128, 128, UNIFORM, 5, 10, {}),
    "prefill, odd strips, biases": (WIDE, 2, 256, 320, UNIFORM, 40, 1, OAI),
    "prefill, mixed": (WIDE, 2, 256, 256, MIXED, 35, 1, RELU2),
    "prefill, 128 rows": (WIDER, 2, 256, 128, UNIFORM, 90, 1, {}),
    "prefill, 128 rows, mixed": (WIDER, 3, 256, 128, MIXED, 50, 2, {}),
    "prefill, 256 rows": (WIDEST, 1, 128, 256, UNIFORM, 140, 1, {}),
    "prefill, 256 rows, mixed": (WIDEST, 3, 256, 128, MIXED, 20, 2, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_equal_the_oracle(library: ctypes.CDLL, name: str) -> None:
    form, experts, hidden, intermediate, kinds, tokens, top_k, options = CASES[name]
    layer = random_layer(experts, hidden, intermediate, kinds, **options)
    x = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(2))
    weights, ids = random_routing(tokens, experts, top_k)
    ids[1, 0] = -1
    found = run(library, layer, x, (weights, ids), form)
    assert error(found, layer.oracle(x, weights, ids)) < bound(form)
    wrong = ids.roll(1, 0) if experts > 1 else torch.full_like(ids, -1)
    assert error(run(library, layer, x, (weights, wrong), form), layer.oracle(x, weights, ids)) > 20 * bound(form)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "tokens"), [(200, 40), (132, 9), (128, 600)])
def test_16_bit_inputs(library: ctypes.CDLL, dtype: torch.dtype, hidden: int, tokens: int) -> None:
    """Aligned vectors with padding and without, single elements, and more chunks than a block knows at once."""
    layer = random_layer(2, hidden, 128, UNIFORM)
    x = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(11)).to(dtype)
    weights, ids = random_routing(tokens, 2, 1)
    ids[tokens - 1 :] = 0
    expected = layer.oracle(x.float(), weights, ids)
    assert error(run(library, layer, x, (weights, ids), WIDE), expected) < bound(WIDE)


@pytest.mark.parametrize(
    ("form", "hidden", "dtype"),
    [(IDENTITY, 8 * 128 + 128, torch.float16), (IDENTITY, 198, torch.bfloat16), (WIDE, 200, torch.float16)],
    ids=str,
)
def test_inputs_of_sixteen_bits_give_what_the_same_numbers_give(
    library: ctypes.CDLL, form: MoeForm, hidden: int, dtype: torch.dtype
) -> None:
    """Also where a warp has two rounds, and where rows begin at addresses that cannot be read by fours."""
    layer = random_layer(2, hidden, 128, UNIFORM)
    x = torch.randn((3, hidden), generator=torch.Generator().manual_seed(10)).to(dtype)
    route = random_routing(3, 2, 1)
    assert torch.equal(run(library, layer, x, route, form), run(library, layer, x.float(), route, form))


@pytest.mark.parametrize("form", [IDENTITY, WIDE], ids=lambda form: form.name)
def test_shared_input_scales_and_router_weights_on_the_input(library: ctypes.CDLL, form: MoeForm) -> None:
    layer = random_layer(2, 256, 128, UNIFORM)
    suh, table = layer.tensors["w13_suh"], pack_table(layer.projections)
    for gate, up, _ in layer.projections:
        suh[up.suh : up.suh + 256] = suh[gate.suh : gate.suh + 256]
    x = torch.randn((5, 256), generator=torch.Generator().manual_seed(4))
    route = random_routing(5, 2, 1)
    route = (route[0] * 0.3, route[1])
    apart = run(library, layer, x, route, form, on_input=True)
    assert error(apart, layer.oracle(x, *route, on_input=True)) < bound(form)
    shared = run(library, layer, x, route, form, on_input=True, table=share_input_scales(table, suh))
    assert torch.equal(shared, apart)


@pytest.mark.parametrize("form", [IDENTITY, THIN, WIDE, WIDER, WIDEST], ids=lambda form: form.name)
def test_a_row_does_not_depend_on_its_batch(library: ctypes.CDLL, form: MoeForm) -> None:
    layer = random_layer(2, 128, 128, UNIFORM)
    x = torch.randn((7, 128), generator=torch.Generator().manual_seed(5))
    weights, ids = random_routing(7, 2, 1)
    whole = run(library, layer, x, (weights, ids), form)
    for row in (0, 6):
        part = slice(row, row + 1)
        assert torch.equal(run(library, layer, x[part], (weights[part], ids[part]), form), whole[part])


@pytest.mark.parametrize("form", [IDENTITY, WIDE], ids=lambda form: form.name)
def test_shares_of_two_ranks_add_up(library: ctypes.CDLL, form: MoeForm) -> None:
    layer = random_layer(4, 128, 128, UNIFORM)
    x = torch.randn((6, 128), generator=torch.Generator().manual_seed(8))
    weights, ids = random_routing(6, 4, 2)
    total = torch.zeros_like(x)
    for here in ([0, 3], [1, 2]):
        expert_map = torch.full((4,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(2, dtype=torch.int32)
        part = MoELayer(128, 128, [layer.projections[e] for e in here], layer.tensors, layer.activation, layer.function)
        total += run(library, part, x, (weights, ids), form, expert_map=expert_map)
    assert error(total, layer.oracle(x, weights, ids)) < bound(form)


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("form", [IDENTITY, WIDE], ids=lambda form: form.name)
def test_rows_of_any_magnitude_keep_to_themselves(library: ctypes.CDLL, form: MoeForm, magnitude: float) -> None:
    layer = random_layer(2, 256, 128, UNIFORM, **RELU2)
    x = torch.randn((5, 256), generator=torch.Generator().manual_seed(9)) * magnitude
    x[0, 17] *= 3000  # an outlier
    route = random_routing(5, 2, 1)
    expected = layer.oracle(x, *route)
    found = run(library, layer, x, route, form)
    for row in range(5):
        assert error(found[row], expected[row]) < 3 * bound(form)
    x[1], x[2, 5] = 0, math.nan
    spoiled = run(library, layer, x, route, form)
    assert (spoiled[1] == 0).all()
    assert spoiled[2].isnan().all()
    assert torch.equal(spoiled[[0, 3, 4]], found[[0, 3, 4]])


def test_sums_that_all_conspire_do_not_overflow(library: ctypes.CDLL) -> None:
    """Weights near the codebook's largest, with the rotated input's very signs; sums are fp16 between the kernels."""
    channels = np.arange(128)
    bits = [channels >> i & 1 for i in range(7)]
    # A flat spectrum, as far as 128 allow it.
    signs = (-1.0) ** (bits[0] * bits[1] + bits[2] * bits[3] + bits[4] * bits[5])
    hidden = 128 * WIDEST_BLOCKS
    layer = random_layer(1, hidden, 128, UNIFORM, **RELU2)
    up = layer.projections[0][0]
    block = encode(np.tile(4 * signs.astype(np.float32), (128, 1)).T, 8, Codebook.MUL1)
    words = torch.from_numpy(np.tile(block, (WIDEST_BLOCKS, 1, 1))).flatten()
    layer.tensors["w13_trellis"][up.trellis : up.trellis + up.trellis_words] = words
    layer.tensors["w13_suh"].fill_(1.0)
    x = torch.from_numpy(np.tile(codec.hadamard() @ signs, WIDEST_BLOCKS)).float().view(1, -1)
    x = x / x.abs().max() * 1.999  # the rows' scale is the power of two above
    route = (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    assert error(run(library, layer, x, route, WIDE), layer.oracle(x, *route)) < bound(WIDE)


def test_neither_the_fat_threshold_nor_shared_scales_change_a_bit(library: ctypes.CDLL) -> None:
    """Two row blocks of 40 and 30 rows, or three of up to 24, and a thin expert; one transformed input or two."""
    layer = random_layer(2, 128, 128, UNIFORM)
    suh, table = layer.tensors["w13_suh"], pack_table(layer.projections)
    for gate, up, _ in layer.projections:
        suh[up.suh : up.suh + 128] = suh[gate.suh : gate.suh + 128]
    x = torch.randn((73, 128), generator=torch.Generator().manual_seed(7))
    weights, ids = torch.rand(73, 1), (torch.arange(73).view(73, 1) >= 70).int()
    shared = share_input_scales(table, suh)
    assert not torch.equal(shared, table)
    fat, thin, fat_shared, thin_shared = (
        run(library, layer, x, (weights, ids), WIDE, fat_rows=rows, table=used)
        for used in (table, shared)
        for rows in (0, 256)
    )
    assert torch.equal(fat, thin)
    assert torch.equal(fat, fat_shared)
    assert torch.equal(fat, thin_shared)
    assert error(fat, layer.oracle(x, weights, ids)) < bound(WIDE)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", [IDENTITY, WIDE], ids=lambda form: form.name)
def test_every_activation(library: ctypes.CDLL, form: MoeForm, name: str) -> None:
    numbers, gated = (1.3, 0.4, 0.8), ACTIVATIONS[name].gated

    def function(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        hidden = torch.from_numpy(np.concatenate([gate, up], axis=1) if gated else up)
        return activate(name, hidden, *numbers).numpy()

    layer = random_layer(1, 128, 128, UNIFORM, gated=gated, activation=(name, *numbers), function=function)
    x = torch.randn((3, 128), generator=torch.Generator().manual_seed(6))
    route = (torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    assert error(run(library, layer, x, route, form), layer.oracle(x, *route)) < bound(form)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 10), (17, 7), (43, 3), (128, 1)])
def test_slots_by_row_blocks_where_they_are_few_or_many(library: ctypes.CDLL, tokens: int, top_k: int) -> None:
    """Both ways of sorting give experts in order, each expert's slots in order, in as few row blocks as fit."""
    experts, top_most = 11, 4
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    ids[ids == 5] = 3  # an expert without rows, and one with many
    layer = random_layer(experts, 128, 128, UNIFORM)
    shape = Layer(tuple((p, 8, Codebook.MUL1) for p in range(3)), experts, experts, top_k, 128, 128)
    plan, memory = plan_moe(shape, tokens, IDENTITY, 2, H200), Memory()
    args = arguments_of(memory, layer, plan, pack_table(layer.projections), IDENTITY, False)
    args.x, args.x_type, args.ids = memory.place(np.ones((tokens, 128), np.float32)), 2, memory.place(ids.numpy())
    library.run_kernel(ctypes.byref(args), ROWS, 0, tokens * top_k + 1, 2, 256, plan.rows_shared[0])

    flat = ids.numpy().ravel()
    here, counts = int((flat >= 0).sum()), np.bincount(flat[flat >= 0], minlength=experts)
    assert (read(args.order, here) == np.argsort(np.where(flat >= 0, flat, experts), kind="stable")[:here]).all()
    listed = read(args.blocks, 4 * read(args.list_sizes, 1)[0]).reshape(-1, 4)
    most = np.where(counts > 2, top_most, 2)
    assert (listed[:, 0] == np.repeat(np.arange(experts), -(-counts // most))).all()
    assert (np.bincount(listed[:, 0], listed[:, 2], experts) == counts).all()
    assert (listed[:, 1] == np.cumsum([0, *listed[:-1, 2]])).all()
    assert ((listed[:, 2] > 0) & (listed[:, 2] <= most[listed[:, 0]])).all()


@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_work_is_sorted_by_kind(library: ctypes.CDLL, tokens: int) -> None:
    """Every row block comes with every projection of a stage, once; kinds of more bits come first."""
    layer = random_layer(5, 128, 128, MIXED)
    kinds, ids = projection_kinds(layer.projections), random_routing(tokens, 5, 3)[1]
    shape = Layer(tuple(zip(kinds[::3], kinds[1::3], kinds[2::3], strict=True)), 5, 5, 3, 128, 128)
    plan, memory = plan_moe(shape, tokens, WIDE, 32, H200), Memory()
    args = arguments_of(memory, layer, plan, pack_table(layer.projections), WIDE, False)
    args.x, args.x_type, args.ids = memory.place(np.ones((tokens, 128), np.float32)), 2, memory.place(ids.numpy())
    assert plan.route is not None
    blocks, rows, threads, shared = plan.route
    assert blocks == 1
    library.run_kernel(ctypes.byref(args), ROUTE, 0, 1, rows, threads, shared)
    library.run_kernel(ctypes.byref(args), TURNS, 0, 2, 1, TURN_THREADS, 0)
    listed = read(args.blocks, 4 * read(args.list_sizes, 1)[0]).reshape(-1, 4)
    for stage, parts in zip(args.stages, ((0, 1), (2,)), strict=True):
        turns = read(stage.turns, 4 * len(parts) * len(listed)).reshape(-1, 4)
        found = [(*turn[:3], turn[3] & 255) for turn in turns.tolist()]
        assert sorted(found) == sorted((*block[:3], i) for block in listed.tolist() for i in range(len(parts)))
        own = [layer.projections[expert][parts[index]] for expert, _, _, index in found]
        assert [turn >> 8 for turn in turns[:, 3].tolist()] == [part.half_bits | part.codebook << 8 for part in own]
        order = [(part.half_bits, part.codebook) for part in own]
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("top_k", [1, 6, 64, 70])
def test_the_sum_of_choices(library: ctypes.CDLL, top_k: int) -> None:
    """Also of more than are read together, and of slots that are elsewhere, whose rows are whatever lies there."""
    layer, tokens = random_layer(3, 200, 128, UNIFORM), 2
    shape = Layer(tuple((p, 8, Codebook.MUL1) for p in range(3)), 3, 3, top_k, 200, 128)
    plan, memory, generator = plan_moe(shape, tokens, IDENTITY, 2, H200), Memory(), np.random.default_rng(12)
    args = arguments_of(memory, layer, plan, pack_table(layer.projections), IDENTITY, False)
    ids, weights = generator.integers(-1, 3, (tokens, top_k), np.int32), generator.random((tokens, top_k), np.float32)
    rows = generator.standard_normal((tokens, top_k, 256)).astype(np.float32)
    rows[ids < 0] = np.nan
    out = np.full((tokens, 200), np.nan, np.float32)
    args.ids, args.weights, args.out = memory.place(ids), memory.place(weights), out.ctypes.data
    args.stages[1].out = memory.place(rows)
    library.run_kernel(ctypes.byref(args), COMBINE, 0, tokens, 1, 256, 0)
    expected = np.einsum("tk,tkc->tc", np.where(ids < 0, 0, weights), np.where(ids[..., None] < 0, 0, rows))[:, :200]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [90, 700, 1500])
def test_slots_are_sorted_by_one_block_or_several(library: ctypes.CDLL, tokens: int) -> None:
    experts, top_k = 7, 3
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    ids[ids == 5] = 0  # an expert without rows
    shape = Layer(
        ((0, 8, Codebook.MUL1), (1, 8, Codebook.MUL1), (2, 8, Codebook.MUL1)), experts, experts, top_k, 128, 128
    )
    plan, memory = plan_moe(shape, tokens, WIDE, 32, H200), Memory()
    args = MoeArgs(ids=memory.place(ids.numpy()), **plan.values)
    scratch = np.full(plan.scratch, 0xFF, np.uint8)
    base = scratch.ctypes.data
    for part in (
        "order",
        "places",
        "blocks",
        "chunks",
        "list_sizes",
        "totals",
        "row_largest",
        "scale_largest",
        "starts",
    ):
        setattr(args, part, base + plan.parts[part])
    assert plan.route is not None
    blocks, _, threads, shared = plan.route
    assert (blocks > 1) == (tokens > 90)
    if blocks > 1:
        library.run_kernel(ctypes.byref(args), COUNT, 0, blocks, 1, threads, 4 * experts)
    library.run_kernel(ctypes.byref(args), ROUTE, 0, blocks, 1, threads, shared)

    def found(part: str, count: int) -> np.ndarray:
        return scratch[plan.parts[part] :][: 4 * count].view(np.int32)

    flat, starts, places = ids.numpy().ravel(), found("starts", experts + 1), found("places", ids.numel())
    counts = np.bincount(flat[flat >= 0], minlength=experts)
    assert (starts == np.concatenate([[0], np.cumsum(-(-counts // 8) * 8)])).all()
    for expert in range(experts):
        mine = np.flatnonzero(flat == expert)
        assert (places[mine] == starts[expert] + np.arange(len(mine))).all()
        assert (found("order", starts[-1])[places[mine]] == mine).all()
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
