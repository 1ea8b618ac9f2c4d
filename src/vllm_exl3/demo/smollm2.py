"""Turns a llama-architecture GGUF file into what a Hugging Face model folder holds.

Three things have to be undone: quantized blocks are expanded to numbers; llama.cpp stores the rows of q
and k with the two halves of each head interleaved, for its rotary layout; and names differ.
Sources: the GGUF specification; llama.cpp's documented tensor names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DenseModel", "hugging_face_config", "hugging_face_tensors", "read_gguf", "unpermute_heads"]

Array = npt.NDArray[np.float32]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class DenseModel:
    """A model in full precision.

    Attributes:
        metadata: the GGUF file's key-value pairs.
        config: Hugging Face ``config.json``.
        tensors: name → float32 values, linears as ``[out, in]``.
    """

    metadata: Mapping[str, Any]
    config: dict[str, Any]
    tensors: dict[str, Array]


def read_gguf(path: Path) -> DenseModel:
    """Read a whole GGUF file.

    Raises:
        ValueError: the file holds another architecture than ``llama``.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    stored = {
        # GGUF lists dimensions fastest first
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        .astype(np.float32)
        .reshape([int(size) for size in reversed(tensor.shape)])
        for tensor in reader.tensors
    }
    return DenseModel(metadata, hugging_face_config(metadata), hugging_face_tensors(metadata, stored))


def unpermute_heads(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's interleaving of the rows of q or k.

    Row 2·i + h of a stored head is row i of half h (h = 0, 1) in the Hugging Face layout.

    Args:
        weight: ``[heads·head_dim, in]``.
        heads: heads of this tensor (key-value heads for k).
    """
    rows = weight.shape[0]
    interleaved = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return interleaved.swapaxes(1, 2).reshape(weight.shape)


def hugging_face_tensors(metadata: Mapping[str, Any], stored: Mapping[str, Array]) -> dict[str, Array]:
    """GGUF tensors under Hugging Face names and in its layout.

    Raises:
        ValueError: a tensor has a name that a llama model does not have.
    """
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    tensors = {}
    for name, weight in stored.items():
        if name in top:
            tensors[top[name]] = weight
            continue
        match name.split("."):
            case ["blk", number, part, "weight"] if part in _LAYER_NAMES:
                converted = unpermute_heads(weight, heads[part]) if part in heads else weight
                tensors[f"model.layers.{number}.{_LAYER_NAMES[part]}.weight"] = converted
            case _:
                raise ValueError(f"GGUF tensor {name}: not part of a llama model without biases")
    return tensors


def hugging_face_config(metadata: Mapping[str, Any], dtype: str = "float16") -> dict[str, Any]:
    """``config.json`` of a llama model with tied embeddings.

    Raises:
        ValueError: the metadata describe another architecture.
    """
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"GGUF architecture {architecture}: expected llama")
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF keeps float32: 9.999999747378752e-06 stands for 1e-05
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 1 / math.sqrt(hidden),
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
    }
