"""DeepSeek V4.1 with its published names: layers that own their compressed keys and selection, and one that reads them.

Its classes are for GPUs only, and transformers does not have it, so the tensors are made here. Its Engram tables and
vision tower are left to vLLM, and no row has any.
"""

import numpy as np

from tests.families.deepseek_v4_rows import DEEPSEEK_V4, HEAD, HIDDEN, Q_RANK, VOCAB, attention, hyper, mlp
from tests.families.family import Family, Tensors

__all__ = ["DEEPSEEK_V41"]

_RATIOS = (0, 2, 2, 1)
_SOURCES = (1, 3)
"""Layers with a compressor and an indexer of their own; the other compressed one reads those of the layer before it."""

_INDEX_HEADS, _INDEX_HEAD, _EXPERTS = 32, 128, 4

_V4 = dict(DEEPSEEK_V4[0].config)
_TEXT = {
    **{name: value for name, value in _V4.items() if name not in ("architectures", "num_hash_layers")},
    "model_type": "deepseek_v41_text",
    "num_hidden_layers": len(_RATIOS),
    "compress_ratios": list(_RATIOS),
    "kv_source_layer_ids": list(_SOURCES),
    "index_source_layer_ids": list(_SOURCES),
    "candidate_source_layer_id": -1,
    "index_n_heads": _INDEX_HEADS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "num_nextn_predict_layers": 0,
    "engram_layer_ids": [],
}


def _indexer(key: str) -> Tensors:
    return {
        f"{key}.wq_b.weight": np.zeros((_INDEX_HEADS * _INDEX_HEAD, Q_RANK)),
        f"{key}.weights_proj.weight": np.zeros((_INDEX_HEADS, HIDDEN)),
        f"{key}.wk.weight": np.zeros((_INDEX_HEAD, HEAD)),
        f"{key}.k_norm.weight": np.ones(_INDEX_HEAD),
    }


def _compressor(key: str, ratio: int) -> Tensors:
    names = ("wkv", "wgate") if ratio > 1 else ("wkv",)
    weights: Tensors = {f"{key}.{name}.weight": np.zeros((HEAD, HIDDEN)) for name in names}
    return {**weights, f"{key}.norm.weight": np.ones(HEAD)}


def _tensors() -> Tensors:
    tensors: Tensors = {
        "embed.weight": np.zeros((VOCAB, HIDDEN)),
        "head.weight": np.zeros((VOCAB, HIDDEN)),
        "norm.weight": np.ones(HIDDEN),
        **{f"image_{name}": np.ones(HIDDEN) for name in ("start", "end", "newline")},
    }
    for layer, ratio in enumerate(_RATIOS):
        key = f"layers.{layer}"
        tensors |= attention(f"{key}.attn")
        if layer in _SOURCES:
            tensors |= _compressor(f"{key}.attn.compressor", ratio)
            tensors |= _indexer(f"{key}.attn.indexer")
        tensors |= {f"{key}.{name}_norm.weight": np.ones(HIDDEN) for name in ("attn", "ffn")}
        for name in ("attn", "ffn"):
            tensors |= hyper(f"{key}.hc_{name}")
        tensors[f"{key}.ffn.gate.weight"] = np.zeros((_EXPERTS, HIDDEN))
        tensors[f"{key}.ffn.gate.bias"] = np.ones(_EXPERTS)
        for expert in range(_EXPERTS):
            tensors |= mlp(f"{key}.ffn.experts.{expert}")
        tensors |= mlp(f"{key}.ffn.shared_experts")
    return tensors


_NATIVE = Family(
    "deepseek_v41",
    {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": _TEXT},
    tensors=_tensors,
    dense="weights_proj$",
    slices=2,
    sliced=r"\.wo_a$",
    bound=0.03,
    options={**DEEPSEEK_V4[0].options, "limit_mm_per_prompt": {"image": 0}},
)

DEEPSEEK_V41 = (
    _NATIVE,
    Family(
        "deepseek_v41_routed",
        _NATIVE.config,
        tensors=_tensors,
        exl3=r"\.experts\.\d+\.",
        bound=0.03,
        options=_NATIVE.options,
    ),
)
