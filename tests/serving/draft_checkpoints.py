"""Small checkpoints of draft models in 16 bits, for a target of `HIDDEN` channels and `VOCABULARY` tokens."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["HIDDEN", "VOCABULARY", "write_draft"]

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 320, 4, 1, 64, 640

_ARCHITECTURES = {
    "eagle": ("LlamaForCausalLM", "llama"),
    "eagle3": ("LlamaForCausalLMEagle3", "llama"),
    "dflash": ("DFlashDraftModel", "qwen3"),
    "medusa": ("MedusaModel", "medusa"),
    "mlp_speculator": ("MLPSpeculatorPreTrainedModel", "mlp_speculator"),
}


def write_draft(folder: Path, method: str, *, vocabulary: int = VOCABULARY, own_embedding: bool = False) -> Path:
    """Write a draft with random weights.

    Args:
        folder: where to.
        method: ``eagle``, ``eagle3``, ``dflash``, ``medusa`` or ``mlp_speculator``.
        vocabulary: tokens that an EAGLE-3 draft proposes.
        own_embedding: store an embedding of the draft's own.
    """
    architecture, model_type = _ARCHITECTURES[method]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 1,
        "torch_dtype": "float32",
    }
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors: dict[str, torch.Tensor] = {}
    if method == "medusa":
        config |= {"num_heads": 2}
        for head in range(2):
            tensors[f"blocks.{head}.layers.0.weight"] = random(HIDDEN, HIDDEN)
            tensors[f"lm_heads.{head}.weight"] = random(VOCABULARY, HIDDEN)
    elif method == "mlp_speculator":
        config |= {
            "emb_dim": HIDDEN,
            "inner_dim": HIDDEN,
            "n_predict": 2,
            "n_candidates": 2,
            "top_k_tokens_per_head": [1],
        }
        tensors["emb.0.weight"] = random(VOCABULARY, HIDDEN)
    else:
        config |= {
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        tensors |= _llama(random, method)
        if method == "eagle3":
            config |= {"draft_vocab_size": vocabulary}
            tensors["lm_head.weight"] = random(vocabulary, HIDDEN)
            if vocabulary != VOCABULARY:
                tensors["d2t"] = torch.zeros(vocabulary, dtype=torch.long)
        if method == "dflash":
            config |= {
                "layer_types": ["full_attention"],
                "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0]},
            }
            tensors["lm_head.weight"] = random(VOCABULARY, HIDDEN)
        if own_embedding:
            tensors["embed_tokens.weight"] = random(VOCABULARY, HIDDEN)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _llama(random, method: str) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """The one decoder layer of a draft, and how hidden states enter it."""
    layer = {"eagle": "layers.0", "eagle3": "midlayer", "dflash": "layers.0"}[method]
    entering = 2 * HIDDEN if method == "eagle3" else HIDDEN
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    joined = {"eagle": 2, "eagle3": 3, "dflash": 1}[method]
    tensors = {
        f"{layer}.self_attn.q_proj.weight": random(queries, entering),
        f"{layer}.self_attn.k_proj.weight": random(keys, entering),
        f"{layer}.self_attn.v_proj.weight": random(keys, entering),
        f"{layer}.self_attn.o_proj.weight": random(HIDDEN, queries),
        f"{layer}.mlp.gate_proj.weight": random(MLP, HIDDEN),
        f"{layer}.mlp.up_proj.weight": random(MLP, HIDDEN),
        f"{layer}.mlp.down_proj.weight": random(HIDDEN, MLP),
        f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "fc.weight": random(HIDDEN, joined * HIDDEN),
    }
    norms = {"eagle": (), "eagle3": (f"{layer}.hidden_norm", f"{layer}.input_layernorm", "norm")}
    names = norms.get(method, (f"{layer}.input_layernorm", "norm", "hidden_norm"))
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in names}
    if method == "dflash":
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
    return tensors
