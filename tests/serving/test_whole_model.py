"""Stored parts whose names a model class would not load: they go to their layer past the class' loader."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.utils import WeightsMapper

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving import whole_model
from vllm_exl3.serving.config import Exl3Config
from vllm_exl3.serving.linear import Exl3LinearMethod
from vllm_exl3.serving.whole_model import OtherNames

PARTS = ("q_proj", "k_proj", "v_proj")


def others(mapping: dict[str, list[str]], keys: tuple[str, ...]) -> tuple[list[str], list[tuple[str, object]]]:
    """The tensors left for the class, and those that the layer ``blocks.0.attn.qkv`` was given, with its shard ids."""
    given: list[tuple[str, object]] = []
    layer = torch.nn.Module()
    layer.register_parameter("trellis", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    layer.trellis.weight_loader = lambda param, tensor, *shard: given.append((str(int(tensor)), *shard))
    layer.quant_method = object.__new__(Exl3LinearMethod)
    layer.quant_method.parts = tuple(SimpleNamespace(key=f"visual.blocks.0.attn.{key}") for key in keys)
    layer.quant_method.layout = SimpleNamespace(part_of_output=list(range(len(keys))))
    model = torch.nn.ModuleDict(
        {"blocks": torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"attn": torch.nn.Module()})})}
    )
    model.get_submodule("blocks.0.attn").qkv = layer
    config = SimpleNamespace(packed_modules_mapping=mapping)
    tensors = [(f"visual.blocks.0.attn.{key}.trellis", torch.tensor(index)) for index, key in enumerate(keys)]
    left = [name for name, _ in OtherNames(config, model).others([*tensors, ("visual.norm.weight", torch.ones(1))])]
    return left, given


@pytest.mark.parametrize("mapping", [{}, {"gate_up_proj": ["gate_proj", "up_proj"]}, {"qkv": ["qkv"]}])
def test_parts_that_the_class_does_not_know_go_to_their_layer(mapping: dict[str, list[str]]) -> None:
    left, given = others(mapping, PARTS)
    assert left == ["visual.norm.weight"]
    assert given == [("0", 0), ("1", 1), ("2", 2)]


@pytest.mark.parametrize(("mapping", "keys"), [({"qkv": list(PARTS)}, PARTS), ({}, ("qkv",))])
def test_names_that_the_class_knows_are_left_to_it(mapping: dict[str, list[str]], keys: tuple[str, ...]) -> None:
    left, given = others(mapping, keys)
    assert len(left) == len(keys) + 1 and not given


def no_such_name(name: str, tensor: torch.Tensor) -> None:
    raise KeyError(name.replace("key_value", "k_proj"))


def cut_by_rows(name: str, tensor: torch.Tensor) -> None:
    tensor.view(3, -1)


@pytest.mark.parametrize("stop", [no_such_name, cut_by_rows])
@pytest.mark.parametrize("leaf", ["trellis", "svh", "weight"])
def test_a_loader_that_stops_at_an_exl3_tensor_is_told_by_it(
    stop: Callable[[str, torch.Tensor], None], leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own message names neither the tensor nor what to do; a fault in something else stays as it is."""
    plain: Any = SimpleNamespace(mark=lambda: None, stream=lambda weights: weights, check_loaded=lambda: None)
    monkeypatch.setattr(whole_model, "DecodedModules", lambda *_: plain)
    key = "model.layers.0.self_attn.key_value"
    config: Any = SimpleNamespace(
        source="pack", pack=SimpleNamespace(linears={key: None}), verify_names=lambda: None, packed_modules_mapping={}
    )

    def load_weights(model: torch.nn.Module, weights: Any) -> None:
        for name, tensor in weights:
            if name.startswith(key):
                stop(name, tensor)

    tensors = [("model.norm.weight", torch.ones(4)), (f"{key}.{leaf}", torch.ones(4, 4))]
    expected = (KeyError, RuntimeError) if leaf == "weight" else Exl3PackError
    with pytest.raises(expected) as caught:
        whole_model._load(load_weights, torch.nn.Linear(1, 1), config, iter(tensors), (), {})
    if leaf != "weight":
        assert f"{key}.{leaf}, at which Linear.load_weights stopped" in str(caught.value)
        assert f"keeps {key} in 16 bits" in str(caught.value)


def test_a_wrapper_whose_own_layers_take_no_config_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-5.3-Flash's: its tower gets none, and its text model is built as a model of another class."""

    class Wrapper:
        def load_weights(self, weights: object) -> set[str]:
            return set()

    current = SimpleNamespace(model_config=object())
    monkeypatch.setattr("vllm_exl3.serving.config.get_current_vllm_config_or_none", lambda: current)
    monkeypatch.setattr(whole_model, "get_model_cls", lambda _: Wrapper)
    stock = Wrapper.load_weights
    Exl3Config({}).apply_vllm_mapper(WeightsMapper())
    assert Wrapper.load_weights is not stock and Wrapper.load_weights.__wrapped__ is stock
