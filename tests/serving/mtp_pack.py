"""A small K-EXAONE without experts, whose draft layer (MTP) is EXL3, in 16 bits, or not stored.

Scales are those of a trained model: what a linear gives is about as large as what it takes, so that float16 will do.
"""

import json
from pathlib import Path

import numpy as np

from tests.serving.dense_twin import dense_weight_of
from tests.tiny_pack import Draft, Spec, linear

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 256, 256, 4, 2, 64, 640, 2


def write_mtp_pack(folder: Path, draft: str) -> Path:
    """Write the pack.

    Args:
        folder: where to.
        draft: ``exl3``, ``dense``, ``mixed`` (attention EXL3, MLP in 16 bits), ``absent``, or ``foreseeing``: EXL3
            but for the projection of its input, which passes the embedding on. Since layers add very little to it
            in such a pack, the head makes of it what the model itself will: drafts are accepted.
    """
    config = {
        "architectures": ["ExaoneMoeForCausalLM"],  # the spelling that every supported release knows
        "model_type": "exaone_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "layer_types": ["full_attention"] * LAYERS,
        "mlp_layer_types": ["dense"] * LAYERS,
        "first_k_dense_replace": LAYERS,
        "num_nextn_predict_layers": 1,
        # vLLM 0.30 and 0.31 read these without asking whether they are there
        "sliding_windows": None,
        "mtp_layer_types": ["full_attention"],
        "mtp_sliding_windows": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "quantization_config": {"quant_method": "exl3", "version": "1.6.5", "bits": 3, "head_bits": 6},
    }
    rng = np.random.default_rng(5)
    tensors: dict[str, Spec] = {"model.embed_tokens.weight": ("F16", rng.standard_normal((VOCABULARY, HIDDEN)))}
    for layer in range(LAYERS):
        tensors |= _layer(f"model.layers.{layer}", "exl3")
    tensors["model.norm.weight"] = ("F16", np.ones(HIDDEN))
    tensors |= _stored("lm_head", HIDDEN, VOCABULARY, "exl3", bits=6)
    if draft != "absent":
        tensors |= _layer("mtp.layers.0", draft)
        tensors |= _stored("mtp.fc", 2 * HIDDEN, HIDDEN, draft)
        for name in ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
            tensors[f"{name}.weight"] = ("F16", np.ones(HIDDEN))
    if draft == "foreseeing":
        tensors = {name: spec for name, spec in tensors.items() if not name.startswith("mtp.fc.")}
        tensors["mtp.fc.weight"] = ("F32", np.eye(HIDDEN, 2 * HIDDEN))
        for name in [name for name in tensors if name.endswith(("o_proj.svh", "down_proj.svh"))]:
            tensors[name] = ("F16", tensors[name][1] / 64)
    Draft(tensors, config).write(folder)
    (folder / "generation_config.json").write_text(json.dumps({}))
    return folder


def _layer(prefix: str, kind: str) -> dict[str, Spec]:
    attention = "exl3" if kind == "mixed" else kind
    mlp = "dense" if kind == "mixed" else kind
    tensors: dict[str, Spec] = {}
    sizes = (
        ("self_attn.q_proj", HIDDEN, HEADS * HEAD_DIM, attention),
        ("self_attn.k_proj", HIDDEN, KV_HEADS * HEAD_DIM, attention),
        ("self_attn.v_proj", HIDDEN, KV_HEADS * HEAD_DIM, attention),
        ("self_attn.o_proj", HEADS * HEAD_DIM, HIDDEN, attention),
        ("mlp.gate_proj", HIDDEN, MLP, mlp),
        ("mlp.up_proj", HIDDEN, MLP, mlp),
        ("mlp.down_proj", MLP, HIDDEN, mlp),
    )
    for name, inputs, outputs, stored in sizes:
        tensors |= _stored(f"{prefix}.{name}", inputs, outputs, stored)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = ("F16", np.ones(HIDDEN))
    for name in ("q_norm", "k_norm"):
        tensors[f"{prefix}.self_attn.{name}.weight"] = ("F16", np.ones(HEAD_DIM))
    return tensors


def _stored(key: str, inputs: int, outputs: int, kind: str, bits: float = 3) -> dict[str, Spec]:
    exl3 = linear(key, inputs, outputs, bits=bits)
    exl3[f"{key}.svh"] = ("F16", exl3[f"{key}.svh"][1] / (1.7 * inputs**0.5))
    return exl3 if kind != "dense" else {f"{key}.weight": ("F32", dense_weight_of(exl3, key))}
