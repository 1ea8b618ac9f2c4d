"""benchmarks/quality.py: a model whose channels are in another order is the same function, off the source's grid."""

import importlib.util

import numpy as np
import torch

from tests.conftest import DATA
from vllm_exl3.demo.smollm2 import DenseModel
from vllm_exl3.verify.judge import compare, final_states

SCRIPT = DATA.parents[1] / "benchmarks" / "quality.py"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def _model() -> DenseModel:
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,)}
    for number in range(2):
        layer = f"model.layers.{number}."
        shapes |= {f"{layer}{part}_layernorm.weight": (64,) for part in ("input", "post_attention")}
        sizes = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
        shapes |= {f"{layer}self_attn.{part}.weight": shape for part, shape in sizes.items()}
        sizes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
        shapes |= {f"{layer}mlp.{part}.weight": shape for part, shape in sizes.items()}
    tensors = {name: random.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()}
    return DenseModel({}, CONFIG, tensors)


def test_permuted_channels_compute_the_same() -> None:
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    quality = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quality)
    model = _model()
    shuffled = quality.permuted(model)
    assert any(not np.array_equal(shuffled[name], model.tensors[name]) for name in shuffled)
    ids = torch.arange(40).view(2, 20) * 7 % 96
    states = [final_states(quality.LoadedTensors("", tensors), CONFIG, ids) for tensors in (model.tensors, shuffled)]
    assert np.abs(compare(*states, ids).kl).max() < 1e-5
    coarse, size = quality.as_gguf(shuffled, "Q4_1")
    kl = compare(states[0], final_states(quality.LoadedTensors("", coarse), CONFIG, ids), ids).kl.mean()
    assert kl > 1e-4
    assert size < sum(weight.nbytes for weight in shuffled.values()) / 4
