"""Code of vLLM's that reads a layer's weights itself, or replaces its layers: what it finds in an EXL3 layer."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import HunYuanMoEV1Config
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

from tests.serving.conftest import MOE, PACKS
from tests.serving.engine import PROMPTS, engine, generate, model_of
from vllm_exl3.pack import Pack
from vllm_exl3.pack.codec import dense_weight
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.specialized_decode import refuse_specialized_decode
from vllm_exl3.serving.transformers_backend import LOGIT_FACTORS, check_logit_factors, read_matrices, reads_matrix

ODD, PHI = "llama_odd-4.0-mul1", "phi3-5.0-mul1"


def decoded(pack: Pack, key: str, rows: int) -> torch.Tensor:
    """The weight ``[out, in]`` of one stored linear, cut to its first ``rows`` outputs, by the numpy decoder."""
    linear = pack.linears[key]
    parts = [pack.read(getattr(linear, leaf).name) for leaf in ("trellis", "suh", "svh")]
    weight = dense_weight(parts[0], linear.half_bits, linear.codebook, *parts[1:])
    return torch.from_numpy(np.ascontiguousarray(weight.T[:rows])).float()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_multi_head_latent_attention_would_read_the_decoded_weight(dtype: torch.dtype) -> None:
    """vLLM sends an identity through layers whose weight it cannot read (MLA's kv_b_proj), in float32 by default."""
    pack = Pack.open(PACKS / ODD)
    prefix = "model.layers.1.self_attn"
    with engine(PACKS / ODD) as llm:
        found = {
            name: get_and_maybe_dequant_weights(model_of(llm).get_submodule(f"{prefix}.{name}"), dtype)
            for name in ("qkv_proj", "o_proj")
        }
    expected = {
        "o_proj": decoded(pack, f"{prefix}.o_proj", 256),
        "qkv_proj": torch.cat(
            [
                decoded(pack, f"{prefix}.{name}", rows)
                for name, rows in (("q_proj", 256), ("k_proj", 64), ("v_proj", 64))
            ]
        ),
    }
    bound = 5e-4 if dtype == torch.float32 else 5e-3  # bfloat16 keeps eight bits
    for name, weight in expected.items():
        assert found[name].dtype == dtype and found[name].shape == weight.shape
        error = torch.linalg.norm(found[name].float() - weight) / torch.linalg.norm(weight)
        assert error <= bound, (name, float(error))


@pytest.mark.slow
@pytest.mark.parametrize("name", [ODD, *MOE])
def test_the_transformers_backend_serves_the_same_tokens(name: str) -> None:
    """``--model-impl transformers``: vLLM's layers put into the model class of transformers."""
    with engine(PACKS / name) as llm:
        expected = generate(llm, PROMPTS)
    with engine(PACKS / name, model_impl="transformers") as llm:
        assert "Transformers" in type(model_of(llm)).__name__
        assert any(hasattr(layer, "trellis") for layer in model_of(llm).modules())
        assert generate(llm, PROMPTS) == expected


GRANITE = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 0.125,
}


@pytest.mark.parametrize("scaling", [8.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_factor_on_logits_that_the_transformers_backend_drops_is_refused(
    scaling: float, variant: Callable[..., Path]
) -> None:
    """Granite divides its logits; vLLM's own class does so, too."""
    folder = variant(ODD, config=lambda config: config.update(GRANITE, logits_scaling=scaling))
    if scaling != 1:
        with (
            pytest.raises(Exl3PackError, match=r"logits_scaling 8\.0 .*transformers backend"),
            engine(folder, model_impl="transformers"),
        ):
            pass
        return
    with engine(folder) as llm:
        expected = generate(llm, PROMPTS)
    with engine(folder, model_impl="transformers") as llm:
        assert generate(llm, PROMPTS) == expected


@pytest.mark.parametrize("name", LOGIT_FACTORS)
def test_every_factor_on_logits_is_known(name: str) -> None:
    def check(value: object, *, backend: bool = True, hidden: int = 256) -> None:
        text = SimpleNamespace(hidden_size=hidden, **{name: value})
        model = SimpleNamespace(using_transformers_backend=lambda: backend, hf_text_config=text)
        check_logit_factors(SimpleNamespace(model_config=model), "pack")

    with pytest.raises(Exl3PackError, match=f"{name} 0.5 in config.json"):
        check(0.5)
    check(0.5, backend=False)
    for neutral in (256 if name == "dim_model_base" else 1, None, 0, False):
        check(neutral)
    check_logit_factors(None, "pack")


@pytest.mark.slow
def test_factors_that_the_backend_itself_knows() -> None:
    source = inspect.getsource(importlib.import_module("vllm.model_executor.models.transformers.causal"))
    assert '"logit_scale"' in source and '"final_logit_softcapping"' in source
    assert not [name for name in LOGIT_FACTORS if f'"{name}"' in source], "the backend has learnt it"


@pytest.mark.slow
def test_what_transformers_fuses_and_the_pack_does_not_is_refused() -> None:
    with (
        pytest.raises(Exl3PackError, match=r"3 stored tensors .*q_proj.*Without --model-impl transformers"),
        engine(PACKS / PHI, model_impl="transformers"),
    ):
        pass


def test_code_that_reads_a_matrix_is_found() -> None:
    source = """
class Router:
    def _init_weights(self, module):
        init(self.other.weight)
    def forward(self, x):
        return self.wg(x) if self.wg.weight.dtype == x.dtype else self.gate(x) * self.scale + other.proj.weight
"""
    assert read_matrices(source) == {"wg"}


@pytest.mark.parametrize(("name", "backend", "found"), [("wg", True, True), ("wg", False, False), ("k", True, False)])
def test_layers_that_transformers_reads_are_decoded(name: str, backend: bool, found: bool) -> None:
    """Hunyuan's router compares the dtype of its linear's weight."""
    model = SimpleNamespace(using_transformers_backend=lambda: backend, hf_config=HunYuanMoEV1Config())
    assert reads_matrix(SimpleNamespace(model_config=model), f"model.layers.0.mlp.gate.{name}") is found


def test_a_decode_step_that_reads_matrices_is_refused_by_name() -> None:
    config = SimpleNamespace(additional_config={"decode_backend": "latency_specialized"})
    with pytest.raises(Exl3PackError, match=r"decode_backend 'latency_specialized' .*Leave decode_backend out"):
        refuse_specialized_decode(config, "pack")
    for extra in ({}, {"decode_backend": "auto"}, None):
        refuse_specialized_decode(SimpleNamespace(additional_config=extra), "pack")
    refuse_specialized_decode(None, "pack")
