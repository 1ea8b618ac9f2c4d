"""Packs of which a decoder layer lacks something that its siblings have; and designs in which layers differ."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_pack import Draft, linear, llama
from vllm_exl3.pack import Pack
from vllm_exl3.pack.check import find_faults, find_warnings
from vllm_exl3.plan.survey import survey

NORM = ("F16", np.ones(128))


def without(draft: Draft, *names: str) -> Draft:
    """The draft without every tensor of these modules (or single tensors)."""
    gone = [key for key in draft.tensors if any(key == name or key.startswith(f"{name}.") for name in names)]
    assert gone, names
    draft.tensors = {key: spec for key, spec in draft.tensors.items() if key not in gone}
    draft.sidecar = None
    return draft


def faults(draft: Draft, folder: Path) -> list[str]:
    return [str(fault) for fault in find_faults(Pack.open(draft.write(folder)))]


MODULES = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
MODULES += [f"self_attn.{name}_proj" for name in "qkvo"]
MODULES += ["input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_module_that_one_layer_lacks_is_named(module: str, layer: int, tmp_path: Path) -> None:
    key = f"model.layers.{layer}.{module}"
    pack = Pack.open(without(llama(layers=5), key).write(tmp_path))
    found = [str(fault) for fault in find_faults(pack)]
    said = [*found, *map(str, find_warnings(pack))]
    assert sum(f"no {key}" in text for text in said) == 1, said
    if layer == 2 or (module.startswith("mlp.") and "gate" not in module):
        assert any(f"found no {key}" in text for text in found)
        assert any(f"no {key}" in fault["found"] for fault in survey(pack)["faults"])  # what `inspect` prints
    else:  # the first and the last layer may be made so
        assert not found


@pytest.mark.parametrize("module", ["mlp.up_proj", "mlp.down_proj"])
def test_half_an_mlp_is_told_in_the_smallest_model(module: str, tmp_path: Path) -> None:
    (fault,) = faults(without(llama(), f"model.layers.1.{module}"), tmp_path)
    assert f"found no model.layers.1.{module}; expected a tensor of it beside model.layers.1.mlp." in fault


def test_a_bias_and_a_correction_bias_of_one_layer_are_missed(tmp_path: Path) -> None:
    draft = llama(layers=5)
    for layer in range(5):
        for name in ("self_attn.q_proj.bias", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
            draft.tensors[f"model.layers.{layer}.{name}"] = NORM
    names = [f"model.layers.2.{name}" for name in ("self_attn.q_proj.bias", "mlp.gate.e_score_correction_bias")]
    found = faults(without(draft, *names), tmp_path)
    assert len(found) == 2 and all(any(f"no {name}" in fault for fault in found) for name in names)


@pytest.mark.parametrize("name", ["model.norm", "model.language_model.norm"])
def test_the_final_norm_is_missed(name: str, tmp_path: Path) -> None:
    draft = llama()
    if "language" in name:
        draft.tensors = {key.replace("model.", "model.language_model.", 1): spec for key, spec in draft.tensors.items()}
        draft.tensors["model.visual.norm.weight"] = draft.tensors["mtp.norm.weight"] = NORM
        draft.sidecar = None
    assert not faults(draft, tmp_path / "whole")
    (fault,) = faults(without(draft, name), tmp_path / "less")
    assert "no the" not in fault and "no final norm" in fault


@pytest.mark.parametrize(
    "name", ["model.final_layernorm", "transformer.ln_f", "backbone.norm_f", "model.embedding_norm"]
)
def test_a_final_norm_of_another_name_is_one(name: str, tmp_path: Path) -> None:
    draft = without(llama(), "model.norm")
    draft.tensors[f"{name}.weight"] = NORM
    assert not faults(draft, tmp_path)


def test_a_model_without_any_norm_needs_no_final_one(tmp_path: Path) -> None:
    draft = llama()
    draft.tensors = {key: spec for key, spec in draft.tensors.items() if "norm" not in key}
    draft.sidecar = None
    assert not faults(draft, tmp_path)


def linear_attention(draft: Draft) -> None:
    """Every fourth layer attends, as in Qwen3-Next."""
    for layer in (0, 1, 2, 4, 5, 6):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            move(draft, f"model.layers.{layer}.self_attn.{name}", f"model.layers.{layer}.linear_attn.in_{name}")


def move(draft: Draft, key: str, to: str | None) -> None:
    moved: dict[str, Any] = {}
    for name, spec in draft.tensors.items():
        if not name.startswith(f"{key}."):
            moved[name] = spec
        elif to is not None:
            moved[name.replace(key, to)] = spec
    draft.tensors = moved


def one_dense_layer(draft: Draft) -> None:
    """The first layer dense, all others with experts, as DeepSeek has them."""
    for layer in range(1, 8):
        prefix = f"model.layers.{layer}.mlp"
        draft.tensors[f"{prefix}.gate.weight"] = NORM
        for name in ("gate_proj", "up_proj", "down_proj"):
            move(draft, f"{prefix}.{name}", f"{prefix}.shared_experts.{name}")


def keys_as_values(draft: Draft) -> None:
    """The layers with full attention take their keys for values, as in Gemma 4."""
    draft.config["layer_types"] = ["full_attention" if layer == 5 else "sliding_attention" for layer in range(8)]
    move(draft, "model.layers.5.self_attn.v_proj", None)


def shared_keys(draft: Draft) -> None:
    """The last layers read what an earlier one has cached."""
    for layer in (6, 7):
        for name in "kv":
            move(draft, f"model.layers.{layer}.self_attn.{name}_proj", None)


def no_attention_in_one(draft: Draft) -> None:
    """A layer that a search for architectures has emptied of its attention, and of the norm before it."""
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm"):
        move(draft, f"model.layers.3.{name}", None)


def no_gates(draft: Draft) -> None:
    for layer in range(8):
        move(draft, f"model.layers.{layer}.mlp.gate_proj", None)


def gated_attention(draft: Draft) -> None:
    """A gate on attention, which has no other half."""
    for layer in range(8):
        draft.tensors |= linear(f"model.layers.{layer}.self_attn.gate_proj", 128, 128)


@pytest.mark.parametrize(
    "design",
    [linear_attention, one_dense_layer, keys_as_values, shared_keys, no_attention_in_one, no_gates, gated_attention],
    ids=lambda design: design.__name__,
)
def test_models_whose_layers_differ_by_design_are_sound(design: Any, tmp_path: Path) -> None:
    draft = llama(layers=8)
    design(draft)
    draft.sidecar = None
    pack = Pack.open(draft.write(tmp_path))
    assert not list(find_faults(pack))
    assert not [str(text) for text in find_warnings(pack) if re.search(r"other layers have", str(text))]


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_norm_whose_bytes_are_read_as_another_type_is_named(layer: int, tmp_path: Path) -> None:
    """The other type has the same size, so nothing else can tell: values would be 2^120 times too large or small."""
    draft = llama(layers=5)
    name = f"model.layers.{layer}.input_layernorm.weight"
    draft.tensors[name] = ("BF16", np.ones(128))
    draft.sidecar = None
    said = [str(text) for text in find_warnings(Pack.open(draft.write(tmp_path)))]
    assert [text for text in said if name in text and "is BF16, where 4 other layers have F16" in text], said


def test_layers_of_two_types_by_design_are_not_odd(tmp_path: Path) -> None:
    draft = llama(layers=5)
    for layer in (0, 1):
        draft.tensors[f"model.layers.{layer}.input_layernorm.weight"] = ("BF16", np.ones(128))
    draft.sidecar = None
    assert not [text for text in find_warnings(Pack.open(draft.write(tmp_path))) if "other layers have" in str(text)]
