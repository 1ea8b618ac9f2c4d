"""The shape of Llama 3 8B, which the benchmarks of whole models serve in EXL3 and in 16 bits."""

import json
from pathlib import Path

__all__ = ["KINDS", "SHAPE", "write_bf16_config"]

KINDS = {"exl3": "native", "bf16": "cublas_bf16"}
"""Weights, and what rows call the kernels that serve them."""

SHAPE = {
    "hidden": 4096,
    "intermediate": 14336,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 128256,
}
"""As `write_random_pack` takes it."""


def write_bf16_config(folder: Path, shape: dict[str, int]) -> None:
    """A folder that describes a bf16 model of a shape; its weights are vLLM's dummies."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "vocab_size": shape["vocab"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
