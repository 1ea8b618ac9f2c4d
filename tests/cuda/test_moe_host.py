"""The MoE kernels, all of them, compiled for the host and held against float64: what a GPU would run, thread by thread.

Barriers, bulk copies, tensor-core instructions and shared memory's limits are those of host/; how fast anything is, and
what is in flight when, only a GPU shows (tests/gpu).
"""

import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.host_kernels import HostKernels
from tests.cuda.moe_host import (
    H200,
    IDENTITY,
    MIXED,
    THIN,
    UNIFORM,
    WIDE,
    WIDER,
    WIDEST,
    WIDEST_BLOCKS,
    Memory,
    arguments_of,
    launch_alone,
    run,
)
from tests.ops.moe_layers import MoELayer, random_layer, random_routing, swiglu
from vllm_exl3.cpu.quantize import encode
from vllm_exl3.cuda.moe_geometry import Layer, MoeForm
from vllm_exl3.cuda.moe_plan import COMBINE, plan_moe
from vllm_exl3.ops.activation import ACTIVATIONS, activate
from vllm_exl3.ops.experts import pack_table, share_input_scales
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import Codebook

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")


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
def test_layers_equal_the_oracle(moe_library: HostKernels, name: str) -> None:
    form, experts, hidden, intermediate, kinds, tokens, top_k, options = CASES[name]
    layer = random_layer(experts, hidden, intermediate, kinds, **options)
    x = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(2))
    weights, ids = random_routing(tokens, experts, top_k)
    ids[1, 0] = -1
    found = run(moe_library, layer, x, (weights, ids), form)
    assert error(found, layer.oracle(x, weights, ids)) < bound(form)
    wrong = ids.roll(1, 0) if experts > 1 else torch.full_like(ids, -1)
    assert error(run(moe_library, layer, x, (weights, wrong), form), layer.oracle(x, weights, ids)) > 20 * bound(form)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "tokens"), [(200, 40), (132, 9), (128, 600)])
def test_16_bit_inputs(moe_library: HostKernels, dtype: torch.dtype, hidden: int, tokens: int) -> None:
    """Aligned vectors with padding and without, single elements, and more chunks than a block knows at once."""
    layer = random_layer(2, hidden, 128, UNIFORM)
    x = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(11)).to(dtype)
    weights, ids = random_routing(tokens, 2, 1)
    ids[tokens - 1 :] = 0
    expected = layer.oracle(x.float(), weights, ids)
    assert error(run(moe_library, layer, x, (weights, ids), WIDE), expected) < bound(WIDE)


@pytest.mark.parametrize(
    ("form", "hidden", "dtype"),
    [(IDENTITY, 8 * 128 + 128, torch.float16), (IDENTITY, 198, torch.bfloat16), (WIDE, 200, torch.float16)],
    ids=str,
)
def test_inputs_of_sixteen_bits_give_what_the_same_numbers_give(
    moe_library: HostKernels, form: MoeForm, hidden: int, dtype: torch.dtype
) -> None:
    """Also where a warp has two rounds, and where rows begin at addresses that cannot be read by fours."""
    layer = random_layer(2, hidden, 128, UNIFORM)
    x = torch.randn((3, hidden), generator=torch.Generator().manual_seed(10)).to(dtype)
    route = random_routing(3, 2, 1)
    assert torch.equal(run(moe_library, layer, x, route, form), run(moe_library, layer, x.float(), route, form))


@pytest.mark.parametrize("form", [IDENTITY, WIDE], ids=lambda form: form.name)
def test_shared_input_scales_and_router_weights_on_the_input(moe_library: HostKernels, form: MoeForm) -> None:
    layer = random_layer(2, 256, 128, UNIFORM)
    suh, table = layer.tensors["w13_suh"], pack_table(layer.projections)
    for gate, up, _ in layer.projections:
        suh[up.suh : up.suh + 256] = suh[gate.suh : gate.suh + 256]
    x = torch.randn((5, 256), generator=torch.Generator().manual_seed(4))
    route = random_routing(5, 2, 1)
    route = (route[0] * 0.3, route[1])
    apart = run(moe_library, layer, x, route, form, on_input=True)
    assert error(apart, layer.oracle(x, *route, on_input=True)) < bound(form)
    shared = run(moe_library, layer, x, route, form, on_input=True, table=share_input_scales(table, suh))
    assert torch.equal(shared, apart)


@pytest.mark.parametrize("form", [IDENTITY, THIN, WIDE], ids=lambda form: form.name)
def test_trellises_may_lie_anywhere_in_memory(moe_library: HostKernels, form: MoeForm) -> None:
    """As those in host memory do, terabytes before or behind the GPU's: offsets are signed and of 64 bits."""
    layer = random_layer(3, 256, 128, MIXED, bias=True)
    x = torch.randn((4, 256), generator=torch.Generator().manual_seed(12))
    route = random_routing(4, 3, 2)
    expected = run(moe_library, layer, x, route, form)
    assert torch.equal(run(moe_library, layer, x, route, form, elsewhere=[0, 2]), expected)


@pytest.mark.parametrize("form", [IDENTITY, THIN, WIDE, WIDER, WIDEST], ids=lambda form: form.name)
def test_a_row_does_not_depend_on_its_batch(moe_library: HostKernels, form: MoeForm) -> None:
    layer = random_layer(2, 128, 128, UNIFORM)
    x = torch.randn((7, 128), generator=torch.Generator().manual_seed(5))
    weights, ids = random_routing(7, 2, 1)
    whole = run(moe_library, layer, x, (weights, ids), form)
    for row in (0, 6):
        part = slice(row, row + 1)
        assert torch.equal(run(moe_library, layer, x[part], (weights[part], ids[part]), form), whole[part])


@pytest.mark.parametrize("form", [IDENTITY, WIDE], ids=lambda form: form.name)
def test_shares_of_two_ranks_add_up(moe_library: HostKernels, form: MoeForm) -> None:
    layer = random_layer(4, 128, 128, UNIFORM)
    x = torch.randn((6, 128), generator=torch.Generator().manual_seed(8))
    weights, ids = random_routing(6, 4, 2)
    total = torch.zeros_like(x)
    for here in ([0, 3], [1, 2]):
        expert_map = torch.full((4,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(2, dtype=torch.int32)
        part = MoELayer(128, 128, [layer.projections[e] for e in here], layer.tensors, layer.activation, layer.function)
        total += run(moe_library, part, x, (weights, ids), form, expert_map=expert_map)
    assert error(total, layer.oracle(x, weights, ids)) < bound(form)


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    ("form", "options"), [(IDENTITY, RELU2), (WIDE, RELU2), (WIDE, {})], ids=["identity", "wide", "eights"]
)
def test_rows_of_any_magnitude_keep_to_themselves(
    moe_library: HostKernels, form: MoeForm, options: dict[str, Any], magnitude: float
) -> None:
    """The last is the transform of SwiGLU's hidden rows, eight at a time."""
    layer = random_layer(2, 256, 128, UNIFORM, **options)
    x = torch.randn((5, 256), generator=torch.Generator().manual_seed(9)) * magnitude
    x[0, 17] *= 3000  # an outlier
    route = random_routing(5, 2, 1)
    expected = layer.oracle(x, *route)
    found = run(moe_library, layer, x, route, form)
    for row in range(5):
        assert error(found[row], expected[row]) < 3 * bound(form)
    x[1], x[2, 5] = 0, math.nan
    spoiled = run(moe_library, layer, x, route, form)
    assert (spoiled[1] == 0).all()
    assert spoiled[2].isnan().all()
    assert torch.equal(spoiled[[0, 3, 4]], found[[0, 3, 4]])


def test_sums_that_all_conspire_do_not_overflow(moe_library: HostKernels) -> None:
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
    assert error(run(moe_library, layer, x, route, WIDE), layer.oracle(x, *route)) < bound(WIDE)


def test_neither_the_fat_threshold_nor_shared_scales_change_a_bit(moe_library: HostKernels) -> None:
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
        run(moe_library, layer, x, (weights, ids), WIDE, fat_rows=rows, table=used)
        for used in (table, shared)
        for rows in (0, 256)
    )
    assert torch.equal(fat, thin)
    assert torch.equal(fat, fat_shared)
    assert torch.equal(fat, thin_shared)
    assert error(fat, layer.oracle(x, weights, ids)) < bound(WIDE)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", [IDENTITY, WIDE], ids=lambda form: form.name)
def test_every_activation(moe_library: HostKernels, form: MoeForm, name: str) -> None:
    numbers, gated = (1.3, 0.4, 0.8), ACTIVATIONS[name].gated

    def function(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        hidden = torch.from_numpy(np.concatenate([gate, up], axis=1) if gated else up)
        return activate(name, hidden, *numbers).numpy()

    layer = random_layer(1, 128, 128, UNIFORM, gated=gated, activation=(name, *numbers), function=function)
    x = torch.randn((3, 128), generator=torch.Generator().manual_seed(6))
    route = (torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    assert error(run(moe_library, layer, x, route, form), layer.oracle(x, *route)) < bound(form)


@pytest.mark.parametrize("top_k", [1, 6, 64, 70])
def test_the_sum_of_choices(moe_library: HostKernels, top_k: int) -> None:
    """Also of more than are read together, and of slots that are elsewhere, whose rows are whatever lies there."""
    layer, tokens = random_layer(3, 200, 128, UNIFORM), 2
    shape = Layer(tuple((p, 8, Codebook.MUL1) for p in range(3)), 3, 3, top_k, 200, 128)
    plan, memory, generator = plan_moe(shape, tokens, IDENTITY, 2, H200), Memory(), np.random.default_rng(12)
    args = arguments_of(memory, layer, plan, pack_table(layer.projections), False)
    ids, weights = generator.integers(-1, 3, (tokens, top_k), np.int32), generator.random((tokens, top_k), np.float32)
    rows = generator.standard_normal((tokens, top_k, 256)).astype(np.float32)
    rows[ids < 0] = np.nan
    out = np.full((tokens, 200), np.nan, np.float32)
    args.ids, args.weights, args.out = memory.place(ids), memory.place(weights), out.ctypes.data
    args.stages[1].out = memory.place(rows)
    launch_alone(moe_library, args, plan, COMBINE)
    expected = np.einsum("tk,tkc->tc", np.where(ids < 0, 0, weights), np.where(ids[..., None] < 0, 0, rows))[:, :200]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
