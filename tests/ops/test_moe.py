"""The MoE op: reference and CPU backend against a float64 oracle with experts that all differ."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import vllm_exl3.ops.moe as moe_module
from tests.ops.moe_layers import MoELayer, random_layer, random_routing, swiglu
from vllm_exl3.cpu.moe import moe_native
from vllm_exl3.cuda.moe import moe as moe_cuda
from vllm_exl3.cuda.moe_by_expert import moe_exllamav3
from vllm_exl3.ops import backends
from vllm_exl3.ops.activation import ACTIVATIONS
from vllm_exl3.ops.experts import pack_table, share_input_scales
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe_by_expert import grouped_experts
from vllm_exl3.pack.stored import Codebook

BOUND = {"reference": 1e-5, "grouped": 1e-5, "native": 1e-3}
"""The C++ library's linears are within 5e-4 each; three follow each other here."""

MUL1, MCG, INST3 = Codebook.MUL1, Codebook.MCG, Codebook.INST3
RATES = (2, 8, 3, 5, 1.5, 4, 6, 7, 3.5, 1, 2.5)
KINDS = (MUL1, MCG, INST3, INST3) * 3
MIXED = [(bits, MUL1 if bits % 1 else kind) for bits, kind in zip(RATES, KINDS, strict=False)]
"""Every rate; half-integer ones exist with mul1 only."""


@dataclass
class Run:
    """One implementation of the op, and how close to the oracle it must be."""

    function: Callable[..., torch.Tensor]
    bound: float

    def __call__(self, x: torch.Tensor, *arguments: object) -> torch.Tensor:
        return self.function(x, *arguments)


def grouped_reference(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Expert after expert, with the reference's linear."""
    return grouped_experts(linear_reference, x, moe_module.MoECall(*arguments))  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    backends.select("moe", "cpu", moe_module.moe_reference)  # imports the backends


@pytest.fixture(params=["reference", "grouped", "native"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "native":
        reason = backends.find("moe", "cpu", "native").unavailable()
        assert reason is None, reason
    functions = {"reference": moe_module.moe_reference, "grouped": grouped_reference, "native": moe_native}
    return Run(functions[request.param], BOUND[request.param])


@pytest.fixture(scope="module")
def layer() -> MoELayer:
    """Eight experts, their projections at every rate and codebook."""
    return random_layer(8, 256, 256, MIXED)


def error(ours: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours.double().numpy() - expected) / np.linalg.norm(expected))


def inputs(tokens: int, hidden: int, seed: int = 3) -> torch.Tensor:
    return torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 300])
def test_mixed_experts_equal_the_oracle(run: Run, layer: MoELayer, tokens: int) -> None:
    x, (weights, ids) = inputs(tokens, 256), random_routing(tokens, 8, 3)
    assert error(run(x, *layer.arguments(weights, ids)), layer.oracle(x, weights, ids)) < run.bound


@pytest.mark.parametrize("tokens", [2, 8])
@pytest.mark.parametrize("fault", ["expert", "weight", "flattened", "token"])
def test_the_bound_catches_a_wrong_route(layer: MoELayer, tokens: int, fault: str) -> None:
    run = Run(moe_native, BOUND["native"])
    x, (weights, ids) = inputs(tokens, 256), random_routing(tokens, 8, 3)
    expected = layer.oracle(x, weights, ids)
    wrong_weights, wrong_ids = weights.clone(), ids.clone()
    if fault == "expert":
        wrong_ids[-1, 0] = (set(range(8)) - set(ids[-1].tolist())).pop()
    elif fault == "weight":
        wrong_weights[0] = weights[0].flip(0)
    elif fault == "flattened":  # the ids of one list read with the wrong stride
        wrong_ids = ids.t().reshape(ids.shape)
    else:
        x = x.roll(1, 0)
    assert error(run(x, *layer.arguments(wrong_weights, wrong_ids)), expected) > 10 * run.bound


# The shapes of real models (experts, top-k, hidden, intermediate, kinds), every width at a fraction.
SHAPES = {
    "288 experts 4096×2048 K2/K3/K4": (288, 8, 256, 128, [(2, MCG), (3, MCG), (4, MCG)], {}),
    "512 experts 2560×640 K3": (512, 10, 256, 128, [(3, MUL1)], {}),
    "384 experts 5120×2304 K2..K8": (96, 6, 384, 256, [(bits, MUL1) for bits in range(2, 9)], {}),
    "128 experts 2048×768 K4": (128, 8, 256, 128, [(4, INST3)], {}),
    "128 experts 2688×1856 ReLU²": (
        64, 6, 336, 232, [(3, MUL1)],
        {
            "gated": False, "activation": ("relu2_ungated", 1.0, 0.0, math.inf),
            "function": lambda _, up: np.maximum(up, 0) ** 2,
        },
    ),
    "32 experts 2880×2880 SwiGLU-OAI, biases": (
        32, 4, 360, 360, [(4, MCG), (5, MCG)],
        {"bias": True, "activation": ("swiglu", 1.702, 1.0, 7.0), "function": swiglu(1.702, 1.0, 7.0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_real_models(name: str) -> None:
    experts, top_k, hidden, intermediate, kinds, options = SHAPES[name]
    layer = random_layer(experts, hidden, intermediate, kinds, **options)
    x, (weights, ids) = inputs(3, hidden), random_routing(3, experts, top_k)
    assert error(moe_native(x, *layer.arguments(weights, ids)), layer.oracle(x, weights, ids)) < BOUND["native"]


@pytest.mark.parametrize(("limit", "scale"), [(math.inf, 2), (1.0, 2), (10.0, 8)])
def test_limits_clip_before_the_activation(run: Run, limit: float, scale: float) -> None:
    layer = random_layer(4, 256, 256, [(2, MCG), (4, MCG)], activation=("swiglu", 1.0, 0.0, limit))
    x, (weights, ids) = inputs(9, 256) * scale, random_routing(9, 4, 2)
    result = run(x, *layer.arguments(weights, ids))
    assert error(result, layer.oracle(x, weights, ids)) < run.bound
    layer.function = swiglu()
    clipped = error(result, layer.oracle(x, weights, ids)) > 10 * run.bound
    assert clipped == (limit < math.inf)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "scale"), [(math.inf, 2), (1.0, 0.75), (10.0, 12)])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("intermediate", [1024, 2048])
def test_limits_at_whole_widths(intermediate: int, bits: int, limit: float, scale: float) -> None:
    layer = random_layer(2, 4096, intermediate, [(bits, MCG)], activation=("swiglu", 1.0, 0.0, limit))
    x, (weights, ids) = inputs(3, 4096) * scale, random_routing(3, 2, 2)
    result = moe_native(x, *layer.arguments(weights, ids))
    assert error(result, layer.oracle(x, weights, ids)) < BOUND["native"]
    layer.function = swiglu()
    assert (error(result, layer.oracle(x, weights, ids)) > 10 * BOUND["native"]) == (limit < math.inf)


def test_padded_channels_between_projections_are_cut_off(run: Run) -> None:
    """Padded outputs may hold noise, and down's padded inputs scales: neither may meet."""
    layer = random_layer(3, 200, 320, [(4, MUL1)], bias=True)
    assert layer.projections[0][0].out_features == 384  # the random scales fill the padding with noise
    x, (weights, ids) = inputs(5, 200), random_routing(5, 3, 2)
    assert error(run(x, *layer.arguments(weights, ids)), layer.oracle(x, weights, ids)) < run.bound


def test_router_weights_on_the_input(run: Run, layer: MoELayer) -> None:
    x, (weights, ids) = inputs(6, 256), random_routing(6, 8, 1)
    weights = weights * 0.3
    result = run(x, *layer.arguments(weights, ids, on_input=True))
    assert error(result, layer.oracle(x, weights, ids, on_input=True)) < run.bound
    assert error(result, layer.oracle(x, weights, ids)) > 10 * run.bound


def test_large_router_weights_do_not_overflow(run: Run, layer: MoELayer) -> None:
    x, (weights, ids) = inputs(3, 256).half(), random_routing(3, 8, 2)
    small, large = (run(x.float(), *layer.arguments(weights * scale, ids)) for scale in (1.0, 1e6))
    torch.testing.assert_close(large, small * 1e6, rtol=1e-4, atol=1.0)


def test_experts_of_other_ranks_and_padding_tokens_add_nothing(run: Run, layer: MoELayer) -> None:
    """The shares of two expert-parallel ranks add up to the whole; ids of -1 stand for no expert."""
    x, (weights, ids) = inputs(20, 256), random_routing(20, 8, 3)
    ids[3] = -1
    ids[7, 1] = -1
    total = torch.zeros_like(x)
    for here in ([0, 3, 4, 6], [1, 2, 5, 7]):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(4, dtype=torch.int32)
        part = MoELayer(256, 256, [layer.projections[e] for e in here], layer.tensors, layer.activation, layer.function)
        total += run(x, *part.arguments(weights, ids, expert_map))
    assert error(total, layer.oracle(x, weights, ids)) < run.bound
    assert not total[3].any()


@pytest.mark.parametrize("mapped", [False, True])
def test_numbers_of_no_expert_add_nothing(run: Run, layer: MoELayer, mapped: bool) -> None:
    x, (weights, ids) = inputs(4, 256), random_routing(4, 8, 3)
    ids = ids.long()
    ids[0, 0], ids[1], ids[2, 2] = 8, 1 << 40, -(1 << 40)
    found = run(x, *layer.arguments(weights, ids, torch.arange(8, dtype=torch.int32) if mapped else None))
    assert error(found, layer.oracle(x, weights, ids)) < run.bound
    assert not found[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_activations_are_rounded_once(run: Run, layer: MoELayer, dtype: torch.dtype) -> None:
    x, (weights, ids) = inputs(16, 256).to(dtype), random_routing(16, 8, 3)
    result = run(x, *layer.arguments(weights, ids))
    assert result.dtype == dtype
    exact = run(x.float(), *layer.arguments(weights, ids))
    torch.testing.assert_close(result, exact.to(dtype), rtol=0, atol=0)
    assert error(exact, layer.oracle(x, weights, ids)) < run.bound


def test_a_row_does_not_depend_on_its_batch(layer: MoELayer) -> None:
    x, (weights, ids) = inputs(40, 256), random_routing(40, 8, 3)
    whole = moe_native(x, *layer.arguments(weights, ids))
    assert torch.equal(whole, moe_native(x, *layer.arguments(weights, ids)))
    for row in (0, 17, 39):
        part = slice(row, row + 1)
        assert torch.equal(moe_native(x[part], *layer.arguments(weights[part], ids[part])), whole[part])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nor_where_its_activation_ends_a_tensor(name: str) -> None:
    gated = ACTIVATIONS[name].gated
    layer = random_layer(1, 128, 100, ((4, MUL1),), gated=gated, activation=(name, 1.5, 0.5, 9.0))
    x, weights, ids = inputs(300, 128), torch.ones(300, 1), torch.zeros(300, 1, dtype=torch.int32)
    whole = moe_native(x, *layer.arguments(weights, ids))
    for row in range(0, 300, 9):
        part = slice(row, row + 1)
        assert torch.equal(moe_native(x[part], *layer.arguments(weights[part], ids[part])), whole[part])


def test_long_prompts_are_cut_without_a_seam(monkeypatch: pytest.MonkeyPatch, layer: MoELayer) -> None:
    x, (weights, ids) = inputs(50, 256), random_routing(50, 8, 3)
    arguments = (x, *layer.arguments(weights, ids))
    whole, grouped = moe_module.moe_reference(*arguments), grouped_reference(*arguments)
    monkeypatch.setattr("vllm_exl3.ops.moe._RESULTS_AT_ONCE", 4 * 3 * 256)
    monkeypatch.setattr("vllm_exl3.ops.moe_by_expert._ROWS_AT_ONCE", 4)
    torch.testing.assert_close(moe_module.moe_reference(*arguments), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grouped_reference(*arguments), grouped, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_rows(run: Run, layer: MoELayer) -> None:
    weights, ids = random_routing(0, 8, 3)
    assert run(inputs(0, 256), *layer.arguments(weights, ids)).shape == (0, 256)


@pytest.mark.parametrize("function", [*(name for name in BOUND), "cuda"])
def test_a_rank_without_experts_adds_nothing(function: str) -> None:
    """An expert_map may leave a rank none. The GPU's op answers before it looks for a GPU: it has nothing to launch."""
    functions = {"reference": moe_module.moe_reference, "grouped": grouped_reference, "native": moe_native}
    layer = random_layer(4, 256, 128)
    x, (weights, ids) = inputs(5, 256).bfloat16(), random_routing(5, 4, 2)
    layer.projections = []
    layer.tensors = {name: None if values is None else values[:0] for name, values in layer.tensors.items()}
    nowhere = torch.full((4,), -1, dtype=torch.int32)
    found = {**functions, "cuda": moe_cuda}[function](x, *layer.arguments(weights, ids, nowhere))
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert not found.any()


@pytest.fixture
def counted() -> Iterator[None]:
    backends.reset_calls()
    yield
    backends.reset_calls()


@pytest.mark.parametrize(("wanted", "serves"), [("auto", "native"), ("native", "native"), ("reference", "reference")])
def test_the_variable_chooses_the_backend(
    counted: None, monkeypatch: pytest.MonkeyPatch, layer: MoELayer, wanted: str, serves: str
) -> None:
    monkeypatch.setenv("VLLM_EXL3_MOE_KERNEL", wanted)
    monkeypatch.setattr(backends, "_choices", {})
    weights, ids = random_routing(2, 8, 3)
    torch.ops.vllm_exl3.moe(inputs(2, 256), *layer.arguments(weights, ids), "Test")
    assert backends.calls() == {("moe", serves, "Test"): 1}


def test_a_backend_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_MOE_KERNEL", "exllamav3")
    monkeypatch.setattr(backends, "_choices", {})
    with pytest.raises(RuntimeError, match="VLLM_EXL3_MOE_KERNEL=exllamav3 cannot serve moe on cpu"):
        backends.select("moe", "cpu", moe_module.moe_reference)


def test_fake_agrees_with_the_op(layer: MoELayer) -> None:
    weights, ids = random_routing(4, 8, 2)
    arguments = (inputs(4, 256).bfloat16(), *layer.arguments(weights, ids), "Test")
    torch.library.opcheck(torch.ops.vllm_exl3.moe, arguments)


def test_equal_input_scales_of_gate_and_up_are_shared() -> None:
    """Expert by expert; the result is the same, and a reload that makes them differ takes the sharing back."""
    layer = random_layer(4, 256, 256, [(3, MUL1), (4, MCG)])
    suh, table = layer.tensors["w13_suh"], pack_table(layer.projections)
    assert torch.equal(share_input_scales(table, suh), table)
    for expert in (0, 2):
        gate, up, _ = layer.projections[expert]
        suh[up.suh : up.suh + 256] = suh[gate.suh : gate.suh + 256]
    shared = share_input_scales(table, suh)
    changed = (shared != table).nonzero().tolist()
    assert changed == [[0, 1, 1], [2, 1, 1]]
    assert shared[0, 1, 1] == table[0, 0, 1]
    x, (weights, ids) = inputs(5, 256), random_routing(5, 4, 2)
    arguments = layer.arguments(weights, ids)
    at = next(i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor) and value.dim() == 3)
    for function in (moe_module.moe_reference, grouped_reference):
        with_shared = (*arguments[:at], shared, *arguments[at + 1 :])
        torch.testing.assert_close(function(x, *with_shared), function(x, *arguments), rtol=0, atol=0)


def test_experts_without_a_gate_share_nothing() -> None:
    layer = random_layer(3, 256, 256, [(3, MUL1)], gated=False)
    table = pack_table(layer.projections)
    assert torch.equal(share_input_scales(table, layer.tensors["w13_suh"]), table)


def test_the_comparison_expert_by_expert(monkeypatch: pytest.MonkeyPatch, layer: MoELayer) -> None:
    """exllamav3's linears, stood in for by the reference's: the table is read on the host, wherever it is."""
    monkeypatch.setattr("vllm_exl3.cuda.exllamav3.linear", linear_reference)
    x, (weights, ids) = inputs(9, 256), random_routing(9, 8, 3)
    found = moe_exllamav3(x, *layer.arguments(weights, ids))
    assert error(found, layer.oracle(x, weights, ids)) < BOUND["grouped"]
