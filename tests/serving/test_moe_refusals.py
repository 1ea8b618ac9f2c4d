"""What the MoE method refuses, without an engine: while a layer is built, and while tensors come."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.ops.moe_layers import random_layer
from tests.serving.moe_module import MLP, Tensors, build, divide_up, load, open_pack, stored
from tests.tiny_pack import MARKER_VALUES
from vllm_exl3.pack.errors import Exl3PackError


def test_more_ranks_than_blocks_are_refused(tmp_path: Path) -> None:
    layer = random_layer(2, 128, 256)
    with pytest.raises(Exl3PackError, match=r"2 blocks of 128 channels for 4 .*--enable-expert-parallel"):
        build(open_pack(tmp_path, stored(layer)), layer, ranks=4)


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


def test_a_division_that_is_neither_is_refused(tmp_path: Path) -> None:
    layer = random_layer(3, 256, 128)
    tensors = stored(layer)
    divide_up(tensors, 16)
    module = build(open_pack(tmp_path, tensors, model_type="laguna"), layer)
    with pytest.raises(Exl3PackError, match=r"gate scales 1\d\.\d times as large as up's"):
        load(module, tensors)


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
def test_lora_is_for_dense_layers(tmp_path: Path, targets: list[str] | None, refused: bool) -> None:
    lora = SimpleNamespace(target_modules=targets)
    layer = random_layer(2, 128, 128)
    pack = open_pack(tmp_path, stored(layer))
    if refused:
        with pytest.raises(Exl3PackError, match="--lora-target-modules"):
            build(pack, layer, lora=lora)
    else:
        build(pack, layer, lora=lora)


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


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        *((spoil(value), r"expert 2 .*experts\.2\.up_proj\.suh") for value in (math.nan, math.inf, 0.0)),
        *((drop(name), rf"no data for .*experts\.{name}") for name in ("1.gate_proj.trellis", "2.down_proj.suh")),
    ],
)
def test_useless_scales_and_tensors_that_never_come_are_named(tmp_path: Path, fault: Fault, message: str) -> None:
    layer = random_layer(3, 128, 128)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer)
    fault(tensors)
    with pytest.raises(Exl3PackError, match=message):
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
