"""The 16-bit (here float32) twin of a pack: what its linears decode to, under the same names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_pack import Spec
from vllm_exl3.pack import Pack
from vllm_exl3.pack.codec import dense_weight
from vllm_exl3.pack.stored import Codebook

__all__ = ["dense_weight_of", "write_dense_twin"]


def dense_weight_of(tensors: dict[str, Spec], key: str) -> np.ndarray[Any, Any]:
    """The weight ``[out, in]`` that the tensors of one mul1 linear stand for."""
    trellis, suh, svh = (tensors[f"{key}.{leaf}"][1] for leaf in ("trellis", "suh", "svh"))
    half_bits = trellis.shape[2] // 8
    scales = [values.astype(np.float16) for values in (suh, svh)]
    return dense_weight(trellis.astype(np.int16), half_bits, Codebook.MUL1, *scales).T.astype(np.float32)


def write_dense_twin(pack: Path, folder: Path) -> Path:
    """Write the twin of a pack of padded layers whose widths config.json tells: a Llama."""
    folder.mkdir()
    config = json.loads((pack / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    widths = {
        "q_proj": (config["num_attention_heads"] * head, hidden),
        "k_proj": (config["num_key_value_heads"] * head, hidden),
        "v_proj": (config["num_key_value_heads"] * head, hidden),
        "o_proj": (hidden, config["num_attention_heads"] * head),
        "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
        "lm_head": (config["vocab_size"], hidden),
    }
    tensors = load_file(pack / "model.safetensors")
    for key, stored in Pack.open(pack).linears.items():
        parts = [tensors.pop(f"{key}.{leaf}").numpy() for leaf in ("trellis", "suh", "svh")]
        tensors.pop(f"{key}.{stored.codebook.label}", None)
        outputs, inputs = widths[key.rpartition(".")[2]]
        weight = dense_weight(parts[0], stored.half_bits, stored.codebook, *parts[1:])
        tensors[f"{key}.weight"] = torch.from_numpy(weight.T[:outputs, :inputs].copy()).float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
