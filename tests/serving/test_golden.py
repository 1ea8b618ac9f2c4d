"""Packs made by exllamav3, served by stock vLLM: the logits are exllamav3's own."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.serving.conftest import DENSE, PACKS, Tensors, golden_logits, relative_error
from tests.serving.engine import engine, logits_of
from vllm_exl3 import runtime_diagnostics
from vllm_exl3.ops import backends

BOUND = 1e-3
"""exllamav3's own fp16 noise against fp32 evaluation is 4e-4 to 7e-4 on these packs."""

SAMPLE = "llama_tied-3.0-mul1"


def expected_backend() -> str:
    """The C++ library must serve where it was built: silently falling back is what this catches."""
    return os.environ.get("VLLM_EXL3_TEST_BACKEND", "native")


@pytest.mark.parametrize("name", DENSE)
def test_logits_are_exllamav3s(name: str) -> None:
    ids, logits = golden_logits(name)
    backends.reset_calls()
    with engine(PACKS / name) as llm:
        assert relative_error(logits_of(llm, ids), logits) <= BOUND
    served = {(op, backend) for op, backend, _ in backends.calls()}
    assert served == {("linear", expected_backend())}
    model = runtime_diagnostics()["models"][-1]
    assert model["dense_linears"] == {}
    assert model["pack"] == str(PACKS / name)


def flip_one_sign(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.down_proj.suh"][3] *= -1


def swap_two_tensors(tensors: Tensors) -> None:
    for leaf in ("trellis", "suh", "svh"):
        gate, up = (f"model.layers.1.mlp.{name}_proj.{leaf}" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def drop_the_last_bit(tensors: Tensors) -> None:
    """A tensor whose K is read as one less: what a decoder that trusts metadata would see."""
    name = "model.layers.0.self_attn.o_proj.trellis"
    tensors[name] = tensors[name][:, :, : tensors[name].shape[2] - 16].contiguous()


@pytest.mark.parametrize("fault", [flip_one_sign, swap_two_tensors, drop_the_last_bit])
def test_the_bound_catches_one_wrong_tensor(variant: Callable[..., Path], fault: Callable[[Tensors], None]) -> None:
    ids, logits = golden_logits(SAMPLE)
    with engine(variant(SAMPLE, fault)) as llm:
        assert relative_error(logits_of(llm, ids), logits) > BOUND


def as_signs(tensors: Tensors) -> None:
    """Rewrite one linear as packs up to exllamav3 0.0.2 stored it: signs as bits."""
    for leaf, old in (("suh", "su"), ("svh", "sv")):
        key = f"model.layers.0.mlp.down_proj.{leaf}"
        negative = (tensors.pop(key) < 0).view(-1, 16).int()
        packed = (negative << torch.arange(16)).sum(1)
        tensors[f"model.layers.0.mlp.down_proj.{old}"] = (packed - ((packed >> 15) << 16)).to(torch.int16)


def as_unit_scales(tensors: Tensors) -> None:
    for leaf in ("suh", "svh"):
        key = f"model.layers.0.mlp.down_proj.{leaf}"
        tensors[key] = torch.where(tensors[key] < 0, -1.0, 1.0).half()


def test_legacy_sign_bits_serve_like_the_same_scales(variant: Callable[..., Path]) -> None:
    ids, _ = golden_logits(SAMPLE)
    with engine(variant(SAMPLE, as_unit_scales)) as llm:
        wanted = logits_of(llm, ids)
    with engine(variant(SAMPLE, as_signs)) as llm:
        torch.testing.assert_close(logits_of(llm, ids), wanted)


def declare_for_the_earlier_plugin(config: dict[str, Any]) -> None:
    """The keys that its pack tool adds to a native declaration."""
    native = dict(config["quantization_config"])
    layers = {
        f"model.layers.{layer}.{name}": {"bits": 3}
        for layer in (0, 1)
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    config["quantization_config"] |= {
        "bits": 3,
        "scope": "native_all_linears",
        "layer_bits": {"0": 3, "1": 3},
        "non_routed_exl3": {
            "codebook": "mul1",
            "bits": 3,
            "modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"],
            "layers": {**layers, "lm_head": {"bits": 6}},
        },
        "derived_from_headers": True,
        "native_quantization_config": native,
    }


def test_a_pack_rewritten_for_the_earlier_plugin_serves_the_same_bits(variant: Callable[..., Path]) -> None:
    ids, _ = golden_logits(SAMPLE)
    folder = variant(SAMPLE, config=declare_for_the_earlier_plugin)
    for name in ("config.json", "quantization_config.json"):
        shutil.copy(PACKS / SAMPLE / name, folder / f"{name}.native")
    with safe_open(folder / "model.safetensors", "pt") as stored:
        weight_map = dict.fromkeys(stored.keys(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with engine(PACKS / SAMPLE) as llm:
        wanted = logits_of(llm, ids)
    with engine(folder) as llm:
        torch.testing.assert_close(logits_of(llm, ids), wanted, rtol=0, atol=0)
