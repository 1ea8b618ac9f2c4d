"""The MoE method without an engine: layouts and loaders, every rank of a split in one process."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.moe_layers import random_layer, random_routing, swiglu
from tests.serving.moe_module import GATED, MIXED, MLP, build, divide_up, error, inputs, load, open_pack, run, stored
from tests.tiny_pack import MARKER_VALUES
from vllm_exl3.pack.stored import Codebook


@pytest.mark.parametrize("names", [GATED, ("w1", "w3", "w2")], ids=["gate_proj", "w1"])
def test_both_naming_schemes_load_every_rate(tmp_path: Path, names: tuple[str, ...]) -> None:
    layer = random_layer(4, 256, 256, MIXED)
    tensors = stored(layer, names)
    module = build(open_pack(tmp_path, tensors), layer)
    load(module, tensors)
    x, (weights, ids) = inputs(9, 256), random_routing(9, 4, 2)
    assert error(run(module, x, weights, ids), layer.oracle(x, weights, ids)) < 1e-3


def test_parameters_have_the_documented_names_and_sizes(tmp_path: Path) -> None:
    layer = random_layer(3, 256, 128, MIXED, bias=True)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer)
    sizes = {name: (param.dtype, tuple(param.shape)) for name, param in module.named_parameters()}
    held = Counter(f"{'w2' if '.down_proj.' in name else 'w13'}_{name.rpartition('.')[2]}" for name in tensors)
    assert sizes == {
        "w13_trellis": (torch.int16, tuple(layer.tensors["w13_trellis"].shape)),
        "w13_suh": (torch.float16, (3 * 2 * 256,)),
        "w13_svh": (torch.float16, (3 * 2 * 128,)),
        "w13_bias": (torch.float32, (3 * 2 * 128,)),
        "w13_mcg": (torch.int32, (held["w13_mcg"],)),
        "w13_mul1": (torch.int32, (held["w13_mul1"],)),
        "w2_trellis": (torch.int16, tuple(layer.tensors["w2_trellis"].shape)),
        "w2_suh": (torch.float16, (3 * 128,)),
        "w2_svh": (torch.float16, (3 * 256,)),
        "w2_bias": (torch.float32, (3 * 256,)),
        "w2_mcg": (torch.int32, (held["w2_mcg"],)),
        "w2_mul1": (torch.int32, (held["w2_mul1"],)),
    }
    assert module.w2_weight_packed is module.w2_trellis
    before = {name: param.data_ptr() for name, param in module.named_parameters()}
    load(module, tensors)
    assert {name: param.data_ptr() for name, param in module.named_parameters()} == before
    for name in ("w13_mcg", "w13_mul1", "w2_mcg", "w2_mul1"):
        assert held[name] and set(getattr(module, name).tolist()) == {MARKER_VALUES[name.partition("_")[2]]}


@pytest.mark.parametrize(("intermediate", "ranks"), [(640, 2), (640, 4), (704, 4), (600, 3), (384, 1)])
def test_tensor_parallel_shares_add_up(tmp_path: Path, intermediate: int, ranks: int) -> None:
    """Whole blocks of 128, unevenly shared; the last one padded; biases added once."""
    layer = random_layer(2, 256, intermediate, MIXED, bias=True)
    tensors = stored(layer, padded_bias=True)
    pack = open_pack(tmp_path, tensors)
    x, (weights, ids) = inputs(5, 256), random_routing(5, 2, 2)
    total, words = torch.zeros(5, 256), 0
    for rank in range(ranks):
        module = build(pack, layer, rank=rank, ranks=ranks)
        load(module, tensors)
        total += run(module, x, weights, ids)
        words += module.w13_trellis.numel() + module.w2_trellis.numel()
    assert error(total, layer.oracle(x, weights, ids)) < 1e-3
    assert words == layer.tensors["w13_trellis"].numel() + layer.tensors["w2_trellis"].numel()


def test_expert_parallel_ranks_take_whole_experts(tmp_path: Path) -> None:
    layer = random_layer(5, 256, 128, MIXED, bias=True)
    tensors = stored(layer)
    pack = open_pack(tmp_path, tensors)
    x, (weights, ids) = inputs(8, 256), random_routing(8, 5, 3)
    total = torch.zeros(8, 256)
    for here in ([0, 2, 4], [1, 3]):
        module = build(pack, layer, here=here)
        loaded = load(module, tensors)
        markers = sum(name.endswith(("mcg", "mul1")) for name in loaded)
        assert len(loaded) - markers == len(here) * 3 * 4
        total += run(module, x, weights, ids)
    assert error(total, layer.oracle(x, weights, ids)) < 1e-3


@pytest.mark.parametrize("shard_id", ["w1", "w3"])
def test_ungated_experts_arrive_as_either_shard(tmp_path: Path, shard_id: str) -> None:
    """Hand-written loaders call the parameters' loaders themselves, and name the only first projection w1."""
    activation = ("relu2_ungated", 1.0, 0.0, math.inf)
    layer = random_layer(
        3, 200, 232, MIXED, gated=False, activation=activation, function=lambda _, up: np.maximum(up, 0) ** 2
    )
    tensors = stored(layer, ("up_proj", "down_proj"))
    module = build(open_pack(tmp_path, tensors), layer, activation="relu2_no_mul")
    params = dict(module.named_parameters())
    for name, (_, values) in tensors.items():
        expert, projection, leaf = name.removeprefix(f"{MLP}.experts.").split(".")
        down = projection == "down_proj"
        param = params[f"{'w2' if down else 'w13'}_{leaf}"]
        loaded = torch.from_numpy(np.array(values))
        assert param.weight_loader(
            param, loaded, name, shard_id="w2" if down else shard_id, expert_id=int(expert), return_success=True
        )
    module.quant_method.process_weights_after_loading(module)
    x, (weights, ids) = inputs(4, 200), random_routing(4, 3, 2)
    assert error(run(module, x, weights, ids), layer.oracle(x, weights, ids)) < 1e-3


def test_swiglu_oai_with_biases(tmp_path: Path) -> None:
    layer = random_layer(4, 200, 200, MIXED, bias=True, function=swiglu(1.702, 1.0, 7.0))
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer, activation="swigluoai")
    load(module, tensors)
    x, (weights, ids) = inputs(6, 200) * 3, random_routing(6, 4, 2)
    assert error(run(module, x, weights, ids), layer.oracle(x, weights, ids)) < 1e-3


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(
    ("model_type", "divisor", "scale"),
    [("laguna", 128, 128), ("laguna", 1, 1), ("mistral4", 128, 128), ("mixtral", 128, 1)],
)
def test_divided_up_projections_are_made_good(
    tmp_path: Path, model_type: str, divisor: float, scale: float, on_input: bool
) -> None:
    layer = random_layer(3, 256, 128)
    tensors = stored(layer)
    divide_up(tensors, divisor)
    module = build(open_pack(tmp_path, tensors, model_type=model_type), layer, apply_router_weight_on_input=on_input)
    load(module, tensors)
    x, (weights, ids) = inputs(6, 256), random_routing(6, 3, 1 if on_input else 2)
    expected = layer.oracle(x, weights, ids, on_input) * scale / divisor
    assert error(run(module, x, weights, ids), expected) < 1e-2  # float16 scales of 1e-4 have few digits


CALLS = [
    ("silu", {}, ("swiglu", 1.0, 0.0, math.inf)),
    ("silu", {"swiglu_limit": 10.0}, ("swiglu", 1.0, 0.0, 10.0)),
    ("silu", {"swiglu_limit": 0.0}, ("swiglu", 1.0, 0.0, math.inf)),
    ("swigluoai", {}, ("swiglu", 1.702, 1.0, 7.0)),
    ("swigluoai_uninterleave", {"swiglu_limit": 7.0, "swiglu_alpha": 1.5}, ("swiglu", 1.5, 0.0, 7.0)),
    ("swiglustep", {}, ("swiglu_step", 1.0, 0.0, 7.0)),
    ("gelu", {}, ("gelu", 1.0, 0.0, math.inf)),
    ("gelu_tanh", {}, ("gelu_tanh", 1.0, 0.0, math.inf)),
]


@pytest.mark.parametrize(("activation", "options", "expected"), CALLS)
def test_activations_are_vllms(tmp_path: Path, activation: str, options: dict, expected: tuple) -> None:
    layer = random_layer(2, 128, 128)
    call = build(open_pack(tmp_path, stored(layer)), layer, activation=activation, **options).quant_method.activation
    assert (call.name, call.alpha, call.beta, call.limit) == expected


def test_other_parameters_of_the_layer_still_load(tmp_path: Path) -> None:
    layer = random_layer(2, 128, 128)
    module = build(open_pack(tmp_path, stored(layer)), layer)
    module.e_score_correction_bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert list(module.load_weights([("routed_experts.e_score_correction_bias", torch.ones(2))])) == [
        "e_score_correction_bias"
    ]
    assert module.e_score_correction_bias.tolist() == [1, 1]


def test_loaders_are_fit_for_layerwise_reloading(tmp_path: Path) -> None:
    """vLLM binds each loader's signature by the name ``param``, runs it on meta tensors and counts its copies."""
    layer = random_layer(2, 128, 256, MIXED, bias=True)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer, ranks=2)
    copied = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal copied
            if func is torch.ops.aten.copy_.default:
                assert args[0].numel() == args[1].numel()
                copied += args[0].numel()
            return func(*args, **(kwargs or {}))

    for name, param in list(module.named_parameters()):
        meta = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)
        meta.weight_loader = param.weight_loader
        assert param.weight_loader.__name__.startswith("load_")
        setattr(module, name, meta)
    with Count():
        for name, (_, values) in tensors.items():
            list(module.load_weights([(name.removeprefix(f"{MLP}.experts."), torch.from_numpy(np.array(values)))]))
    assert copied == sum(param.numel() for param in module.parameters())


def test_reloading_decides_anew_which_input_scales_are_shared(tmp_path: Path) -> None:
    """Equal scales of gate and up are one; a reload that changes them is followed, in the same memory."""
    layer = random_layer(2, 256, 256, [(3, Codebook.MUL1)])
    suh = layer.tensors["w13_suh"]
    for gate, up, _ in layer.projections:
        suh[up.suh : up.suh + 256] = suh[gate.suh : gate.suh + 256]
    module = build(open_pack(tmp_path, stored(layer)), layer)
    load(module, stored(layer))
    method, cpu = module.quant_method, torch.device("cpu")
    table = method._table(module, cpu)
    assert torch.equal(table[:, 0, 1], table[:, 1, 1])
    gate, up, _ = layer.projections[1]
    suh[up.suh] *= 2
    load(module, stored(layer))
    assert method._table(module, cpu) is table
    assert table[0, 0, 1] == table[0, 1, 1]
    assert table[1, 0, 1] == gate.suh
    assert table[1, 1, 1] == up.suh
    x, (weights, ids) = inputs(4, 256), random_routing(4, 2, 2)
    assert error(run(module, x, weights, ids), layer.oracle(x, weights, ids)) < 1e-3
