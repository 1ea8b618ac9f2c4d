"""The shape of Llama 3 8B, which the benchmarks of whole models serve in EXL3 and in vLLM's own formats."""

import json
from pathlib import Path

__all__ = ["KINDS", "SHAPE", "is_exl3", "options_of", "write_bf16_config"]

KINDS = {
    "exl3": "native",
    "exl3_fast": "native_fast",
    "int4": "marlin_int4",
    "fp8": "vllm_fp8",
    "bf16": "cublas_bf16",
}
"""Weights, and what rows call the kernels that serve them."""

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}


def is_exl3(kind: str) -> bool:
    """True for those of `KINDS` that are EXL3 packs."""
    return kind.startswith("exl3")


def options_of(kind: str) -> dict[str, object]:
    """vLLM's options that a kind needs besides those of its checkpoint."""
    return {"load_format": "auto" if is_exl3(kind) else "dummy", **({"quantization": "fp8"} if kind == "fp8" else {})}


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


def write_bf16_config(folder: Path, shape: dict[str, int], kind: str = "bf16") -> None:
    """A folder that describes a model of a shape in bf16, or what `KINDS` has of it; its weights are vLLM's dummies."""
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
        "torch_dtype": "float16" if kind == "int4" else "bfloat16",
    }
    if kind == "int4":
        config["quantization_config"] = _GPTQ
    (folder / "config.json").write_text(json.dumps(config))
