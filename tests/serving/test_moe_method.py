"""The MoE method without an engine: layouts, loaders and refusals, every rank of a split in one process."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.moe_layers import MoELayer, random_layer, random_routing, swiglu
from tests.tiny_pack import MARKER_VALUES, Draft
from vllm_exl3.pack import Pack
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.serving import moe_checks
from vllm_exl3.serving.moe import Exl3MoEMethod
from vllm_exl3.serving.report import Report

MLP = "model.layers.0.mlp"
GATED = ("gate_proj", "up_proj", "down_proj")
MIXED = [(2, Codebook.MUL1), (5, Codebook.MCG), (3, Codebook.INST3), (1.5, Codebook.MUL1)]

Tensors = dict[str, tuple[str, np.ndarray]]


@pytest.fixture(autouse=True)
def no_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_checks, "get_current_vllm_config", lambda: SimpleNamespace(lora_config=None))


def stored(layer: MoELayer, names: tuple[str, ...] = GATED, padded_bias: bool = False) -> Tensors:
    """A layer's experts under their checkpoint names."""
    tensors: Tensors = {}
    for expert, projections in enumerate(layer.projections):
        for index, (part, name) in enumerate(zip(projections, names, strict=True)):
            down = index == len(names) - 1
            flat, key = "w2" if down else "w13", f"{MLP}.experts.{expert}.{name}"
            for leaf, dtype, start, shape in (
                ("trellis", "I16", part.trellis, part.trellis_shape),
                ("suh", "F16", part.suh, (part.in_features,)),
                ("svh", "F16", part.svh, (part.out_features,)),
            ):
                values = layer.tensors[f"{flat}_{leaf}"][start : start + math.prod(shape)]
                tensors[f"{key}.{leaf}"] = (dtype, values.view(shape).numpy())
            codebook = Codebook(part.codebook)
            if codebook is not Codebook.INST3:
                tensors[f"{key}.{codebook.label}"] = ("I32", np.array(MARKER_VALUES[codebook.label]))
            if part.bias >= 0:
                width = layer.hidden if down else layer.intermediate
                values = layer.tensors[f"{flat}_bias"][part.bias : part.bias + width].numpy()
                if padded_bias:
                    values = np.pad(values, (0, part.out_features - width))
                tensors[f"{key}.bias"] = ("F32", values)
    return tensors


def open_pack(folder: Path, tensors: Tensors, **config: Any) -> Pack:
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, **config}
    return Pack.open(Draft(dict(tensors), config).write(folder))


def build(
    pack: Pack,
    layer: MoELayer,
    *,
    activation: str = "silu",
    rank: int = 0,
    ranks: int = 1,
    here: list[int] | None = None,
    eplb: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """A built, unloaded stand-in for vLLM's RoutedExperts on one rank."""
    total = len(layer.projections)
    local = list(range(total)) if here is None else here
    module = torch.nn.Module()
    module.layer_name = f"{MLP}.experts"
    module.global_num_experts = total
    module.expert_map = None
    if here is not None:
        module.expert_map = torch.full((total,), -1, dtype=torch.int32)
        module.expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    module._map_global_expert_id_to_local_expert_id = lambda e: local.index(e) if e in local else -1
    module.activation = SimpleNamespace(value=activation)
    module.swiglu_limit = module.swiglu_alpha = module.swiglu_beta = None
    module.apply_router_weight_on_input = False
    module.moe_config = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(tp_rank=rank, tp_size=ranks, dp_size=1, enable_eplb=eplb),
        activation_situ_beta=None,
        activation_situ_linear_beta=None,
    )
    for name, value in options.items():
        setattr(module, name, value)
    report = Report()
    config = SimpleNamespace(
        pack=pack,
        report=report,
        layer_ready=lambda where, layer: report.layer_ready(where, layer, pack),
        trellis_arrived=lambda trellis: None,
    )
    module.quant_method = Exl3MoEMethod(config, f"{MLP}.experts", module, pack.experts[MLP])
    module.quant_method.create_weights(
        module, len(local), layer.hidden, -(-layer.intermediate // ranks), torch.float32, weight_loader=None
    )
    return module


def load(module: torch.nn.Module, tensors: Tensors) -> list[str]:
    """Load through the layer's own method, as the runner does; the buffer of each tensor is reused afterwards."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, values) in tensors.items():
            kind = {"I16": np.int16, "F16": np.float16, "I32": np.int32, "F32": np.float32}[dtype]
            buffer = torch.from_numpy(np.array(values, kind))
            yield name.removeprefix(f"{MLP}.experts."), buffer
            buffer.fill_(77)

    names = list(module.load_weights(stream()))
    module.quant_method.process_weights_after_loading(module)
    return names


def run(module: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return module.quant_method.apply(module, x, weights, ids, None, None)


def error(ours: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours.double().numpy() - expected) / np.linalg.norm(expected))


def inputs(tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(3))


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


def test_more_ranks_than_blocks_are_refused(tmp_path: Path) -> None:
    layer = random_layer(2, 128, 256)
    with pytest.raises(Exl3PackError, match=r"2 blocks of 128 channels for 4 .*--enable-expert-parallel"):
        build(open_pack(tmp_path, stored(layer)), layer, ranks=4)


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


def test_a_rank_without_experts_is_refused(tmp_path: Path) -> None:
    layer = random_layer(2, 128, 128)
    pack = open_pack(tmp_path, stored(layer))
    with pytest.raises(Exl3PackError, match="at least one expert on every rank"):
        build(pack, layer, here=[])


def test_a_wrong_marker_value_is_refused_while_loading(tmp_path: Path) -> None:
    """From the Hub, the check before loading reads only some of them."""
    layer = random_layer(2, 128, 128)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer)
    name = next(name for name in tensors if name.endswith(".mul1"))
    wrong = {name: ("I32", np.array(MARKER_VALUES["mul1"] ^ 1))}
    with pytest.raises(Exl3PackError, match=re.escape(name)):
        load(module, wrong)


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


def divide_up(tensors: Tensors, divisor: float) -> None:
    for name, (dtype, values) in tensors.items():
        if name.endswith("up_proj.suh"):
            tensors[name] = (dtype, (values / divisor).astype(np.float16))


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(
    ("model_type", "divisor", "scale"), [("laguna", 128, 128), ("laguna", 1, 1), ("mixtral", 128, 1)]
)
def test_lagunas_divided_up_projections_are_made_good(
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


def test_a_division_that_is_neither_is_refused(tmp_path: Path) -> None:
    layer = random_layer(3, 256, 128)
    tensors = stored(layer)
    divide_up(tensors, 16)
    module = build(open_pack(tmp_path, tensors, model_type="laguna"), layer)
    with pytest.raises(Exl3PackError, match=r"gate scales 1\d\.\d times as large as up's"):
        load(module, tensors)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu2"}, "found the activation relu2; expected one of silu, "),
        ({"activation": "gelu", "swiglu_limit": 7.0}, "a swiglu_limit of 7 with the activation gelu"),
        ({"eplb": True}, "--enable-eplb; expected experts that stay where they are"),
    ],
)
def test_what_is_not_served_is_refused_when_built(tmp_path: Path, options: dict, message: str) -> None:
    layer = random_layer(2, 128, 128)
    with pytest.raises(Exl3PackError, match=message):
        build(open_pack(tmp_path, stored(layer)), layer, **options)


@pytest.mark.parametrize(("targets", "refused"), [(None, True), (["q_proj", "experts"], True), (["q_proj"], False)])
def test_lora_is_for_dense_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str] | None, refused: bool
) -> None:
    lora = SimpleNamespace(lora_config=SimpleNamespace(target_modules=targets))
    monkeypatch.setattr(moe_checks, "get_current_vllm_config", lambda: lora)
    layer = random_layer(2, 128, 128)
    pack = open_pack(tmp_path, stored(layer))
    if refused:
        with pytest.raises(Exl3PackError, match="--lora-target-modules"):
            build(pack, layer)
    else:
        build(pack, layer)


Fault = Callable[[Tensors], None]


def drop(suffix: str) -> Fault:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(f"{MLP}.experts.{suffix}")]:
            del tensors[name]

    return change


def widen(tensors: Tensors) -> None:
    for leaf, shape in (("trellis", (8, 16, 48)), ("svh", (256,)), ("bias", (256,))):
        name = f"{MLP}.experts.1.up_proj.{leaf}"
        tensors[name] = (tensors[name][0], np.ones(shape))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop("1."), r"found EXL3 experts 0, 2; expected experts 0 to 2"),
        (drop("2.up_proj"), r"expert 2 with down, gate in EXL3; expected gate, up, down in every expert"),
        (drop("2.up_proj.bias"), r"biases on 5 of 6 w13 projections"),
        (widen, r"expert 1 .*found a trellis of 128 × 256 channels for up; expected 128 × 128"),
    ],
)
def test_packs_that_do_not_fit_are_refused_when_built(tmp_path: Path, fault: Fault, message: str) -> None:
    layer = random_layer(3, 128, 128, bias=True)
    tensors = stored(layer)
    fault(tensors)
    with pytest.raises(Exl3PackError, match=message):
        build(open_pack(tmp_path, tensors), layer)


def spoil(value: float) -> Fault:
    def change(tensors: Tensors) -> None:
        name = f"{MLP}.experts.2.up_proj.suh"
        values = tensors[name][1].copy()
        values[3 : None if value == 0 else 4] = value
        values[: 3 if value == 0 else 0] = 0
        tensors[name] = (tensors[name][0], values)

    return change


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_useless_scales_name_their_expert(tmp_path: Path, value: float) -> None:
    layer = random_layer(3, 128, 128)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer)
    spoil(value)(tensors)
    with pytest.raises(Exl3PackError, match=r"expert 2 .*experts\.2\.up_proj\.suh"):
        load(module, tensors)


@pytest.mark.parametrize("missing", ["1.gate_proj.trellis", "2.down_proj.suh"])
def test_tensors_that_never_come_are_named(tmp_path: Path, missing: str) -> None:
    layer = random_layer(3, 128, 128)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer)
    drop(missing)(tensors)
    with pytest.raises(Exl3PackError, match=rf"no data for .*experts\.{missing}"):
        load(module, tensors)


def test_a_changed_pack_is_refused_while_loading(tmp_path: Path) -> None:
    layer = random_layer(3, 128, 128)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer)
    tensors[f"{MLP}.experts.1.gate_proj.trellis"] = ("I16", np.zeros((8, 8, 64)))
    with pytest.raises(Exl3PackError, match=r"found shape \[8, 8, 64\]; expected \[8, 8, 48\]"):
        load(module, tensors)


@pytest.mark.parametrize("name", ["0.weird_proj.trellis", "0.gate_proj.weight", "gate_up_proj"])
def test_unknown_tensors_are_refused(tmp_path: Path, name: str) -> None:
    layer = random_layer(2, 128, 128)
    module = build(open_pack(tmp_path, stored(layer)), layer)
    with pytest.raises(Exl3PackError, match="please report it"):
        list(module.load_weights([(name, torch.zeros(2, 2))]))


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
    table = method._table(cpu)
    assert torch.equal(table[:, 0, 1], table[:, 1, 1])
    gate, up, _ = layer.projections[1]
    suh[up.suh] *= 2
    load(module, stored(layer))
    assert method._table(cpu) is table
    assert table[0, 0, 1] == table[0, 1, 1]
    assert table[1, 0, 1] == gate.suh
    assert table[1, 1, 1] == up.suh
    x, (weights, ids) = inputs(4, 256), random_routing(4, 2, 2)
    assert error(run(module, x, weights, ids), layer.oracle(x, weights, ids)) < 1e-3
