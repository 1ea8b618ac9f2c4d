"""Routed experts that cannot be served, and numbers of config.json that no model has: named before a weight is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_pack import Draft, linear, llama
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check, find_faults

MLP = "model.layers.{}.mlp"
GATED = (("gate_proj", 128, 256), ("up_proj", 128, 256), ("down_proj", 256, 128))
SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

Spoil = Callable[[Draft], object]


def moe(layers: int = 2, experts: int = 3, bias: bool = False) -> Draft:
    """A small model of which every layer has experts and a router in 16 bits."""
    draft = llama(layers=layers)
    draft.config |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    draft.sidecar = None
    for layer in range(layers):
        mlp = MLP.format(layer)
        draft.drop(*(f"{mlp}.{name}.{leaf}" for name, *_ in GATED for leaf in ("trellis", "suh", "svh", "mul1")))
        draft.tensors[f"{mlp}.gate.weight"] = ("F16", np.ones((experts, 128)))
        for expert in range(experts):
            for name, inputs, outputs in GATED:
                draft.add_linear(f"{mlp}.experts.{expert}.{name}", inputs, outputs, bias=bias and outputs)
    return draft


def rename(old: str, new: str, *, keep: bool = False) -> Spoil:
    def change(draft: Draft) -> None:
        for name in [name for name in draft.tensors if old in name]:
            values = draft.tensors[name] if keep else draft.tensors.pop(name)
            draft.tensors[name.replace(old, new)] = values

    return change


def drop(prefix: str) -> Spoil:
    def change(draft: Draft) -> None:
        for name in [name for name in draft.tensors if name.startswith(prefix)]:
            del draft.tensors[name]

    return change


def widen(draft: Draft) -> None:
    draft.tensors |= linear("model.layers.1.mlp.experts.2.up_proj", 128, 384)


BAD_EXPERTS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "one projection under two names": (
        rename("layers.1.mlp.experts.0.gate_proj.", "layers.1.mlp.experts.0.w1.", keep=True),
        ("layers.1.mlp.experts.0.gate_proj and", "layers.1.mlp.experts.0.w1:", "under two names"),
    ),
    "one expert under two numbers": (
        rename("layers.0.mlp.experts.1.", "layers.0.mlp.experts.01.", keep=True),
        ("layers.0.mlp.experts.1.gate_proj and", "layers.0.mlp.experts.01.gate_proj", "2 more faults"),
    ),
    "no expert beside a router": (
        drop("model.layers.1.mlp.experts."),
        ("a router (model.layers.1.mlp.gate) and no expert", "model.layers.1.mlp.experts in"),
    ),
    "one expert missing": (drop("model.layers.1.mlp.experts.2."), ("experts 2 incomplete", "3 experts")),
    "one projection missing": (drop("model.layers.1.mlp.experts.0.up_proj."), ("experts 0 incomplete", "gate, up")),
    "an expert too many": (
        rename("layers.0.mlp.experts.1.", "layers.0.mlp.experts.3.", keep=True),
        ("experts 3 too many",),
    ),
    "one projection of another width": (widen, ("128 × 384 channels for up", "128 × 256", "experts.2.up_proj.trellis")),
    "gate and down exchanged": (
        lambda d: [
            rename(f"layers.0.mlp.experts.1.{a}", f"layers.0.mlp.experts.1.{b}")(d)
            for a, b in (("gate", "x"), ("down", "gate"), ("x", "down"))
        ],
        ("a trellis of 256 × 128 channels for gate", "128 × 256"),
    ),
    "a bias on one of all": (
        lambda d: d.tensors.update({"model.layers.0.mlp.experts.1.up_proj.bias": ("F16", np.ones(256))}),
        ("no bias on 5 of 6 projections", "model.layers.0.mlp.experts in"),
    ),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_bad_experts_are_refused_with_four_parts(case: str, tmp_path: Path) -> None:
    spoil, fragments = BAD_EXPERTS[case]
    draft = moe()
    spoil(draft)
    with pytest.raises(Exl3PackError) as caught:
        check(Pack.open(draft.write(tmp_path)))
    assert all(part.strip() for part in caught.value.parts().values())
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: None,
        rename("layers.1.mlp.experts.0.gate_proj.", "layers.1.mlp.experts.0.w1."),
        lambda d: [rename(f".{old}.", f".{new}.")(d) for old, new in SHORT.items()],
        # 16-bit experts of one layer, as checkpoints stack them; a dense layer, which has no router
        lambda d: [
            drop("model.layers.1.mlp.experts.")(d),
            d.tensors.update({"model.layers.1.mlp.experts.gate_up_proj": ("F16", np.ones((3, 8, 8)))}),
        ],
        lambda d: [drop("model.layers.0.mlp.")(d), d.add_linear("model.layers.0.mlp.down_proj", 256, 128)],
        # a draft layer without experts is not read unless somebody speculates
        lambda d: [drop("model.layers.1.mlp.experts.")(d), d.config.update(num_hidden_layers=1, num_mtp_layers=1)],
    ],
    ids=["as it was", "two schemes", "short names", "16-bit experts", "a dense layer", "a draft layer"],
)
def test_experts_that_are_only_unusual_are_fine(change: Spoil, tmp_path: Path) -> None:
    draft = moe()
    change(draft)
    assert not list(find_faults(Pack.open(draft.write(tmp_path))))


def test_biases_on_all_experts_are_fine(tmp_path: Path) -> None:
    assert not list(find_faults(Pack.open(moe(bias=True).write(tmp_path))))


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("num_hidden_layers", "two", '"two"'),
        ("num_hidden_layers", -1, "-1"),
        ("num_hidden_layers", 0, "0"),
        ("num_hidden_layers", float("inf"), "Infinity"),
        ("num_hidden_layers", True, "true"),
        ("num_hidden_layers", 2.0, "2.0"),
        ("num_hidden_layers", "9" * 5000, "99…"),
        ("hidden_size", [128], "[128]"),
        ("vocab_size", {}, "{}"),
        ("num_attention_heads", "2", '"2"'),
        ("num_key_value_heads", -2, "-2"),
        ("architectures", 5, "5"),
        ("architectures", [None], "[null]"),
        ("architectures", "LlamaForCausalLM", '"LlamaForCausalLM"'),
        ("num_experts", 3.0, "3.0"),
        ("num_experts", 0, "0"),
        ("num_experts_per_tok", 4, "4"),
        ("num_experts_per_tok", 0, "0"),
        ("moe_intermediate_size", 0, "0"),
    ],
)
def test_numbers_that_no_model_has_are_named(name: str, value: Any, found: str, tmp_path: Path) -> None:
    draft = moe(layers=1)
    draft.config[name] = value
    faults = list(find_faults(Pack.open(draft.write(tmp_path))))
    assert [fault for fault in faults if fault.found.startswith(f"{name} ") and fault.found.endswith(found)]
    with pytest.raises(Exl3PackError, match=r"config\.json of"):
        check(Pack.open(tmp_path))


@pytest.mark.parametrize(
    "values",
    [
        {"num_key_value_heads": None, "architectures": None},
        {"num_attention_heads": [2, 2], "intermediate_size": [256]},
        {"num_experts_per_tok": [2]},
        {"text_config": {"hidden_size": 128, "num_hidden_layers": 1}, "num_hidden_layers": "ignored"},
    ],
)
def test_values_that_some_model_has_are_fine(values: dict[str, Any], tmp_path: Path) -> None:
    draft = moe(layers=1)
    draft.config |= values
    assert not list(find_faults(Pack.open(draft.write(tmp_path))))


def test_a_dense_model_may_say_what_it_likes_of_experts(tmp_path: Path) -> None:
    draft = llama(layers=1)
    draft.config |= {"num_experts": 0, "num_experts_per_tok": -1, "moe_intermediate_size": None}
    assert check(Pack.open(draft.write(tmp_path))) == []
