"""DeepSeek V4 with its published names: every kind of its layers, native and with routed experts alone in EXL3.

vLLM has a class of it for CPUs with AMX. transformers saves it under other names, so the tensors are made here.
"""

import re
from typing import Any

import numpy as np

from tests.families.family import Family, Tensors

__all__ = ["DEEPSEEK_V4", "HEAD", "HIDDEN", "Q_RANK", "VOCAB", "attention", "hyper", "mlp"]

HIDDEN, _HEADS, HEAD, _ROPE = 128, 4, 512, 64
Q_RANK, _O_GROUPS, _O_RANK = 128, 2, 128
_INDEX_HEADS, _INDEX_HEAD = 64, 128
_MLP, _EXPERTS, _TOP_K, VOCAB = 128, 64, 6, 640
_STREAMS = 4
_RATIOS = (0, 4, 128)
"""The layers: a sliding window alone, one key of four with an indexer, one of 128."""

_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": HIDDEN,
    "num_hidden_layers": len(_RATIOS),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "qk_rope_head_dim": _ROPE,
    "q_lora_rank": Q_RANK,
    "o_lora_rank": _O_RANK,
    "o_groups": _O_GROUPS,
    "index_n_heads": _INDEX_HEADS,
    "index_head_dim": _INDEX_HEAD,
    "index_topk": 512,
    "compress_ratios": list(_RATIOS),
    "sliding_window": 128,
    "moe_intermediate_size": _MLP,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": _TOP_K,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 0,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": _STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _compressor(key: str, ratio: int, width: int) -> Tensors:
    outputs = width * (2 if ratio == 4 else 1)  # windows of one key of four overlap
    return {
        f"{key}.wkv.weight": np.zeros((outputs, HIDDEN)),
        f"{key}.wgate.weight": np.zeros((outputs, HIDDEN)),
        f"{key}.norm.weight": np.ones(width),
        f"{key}.ape": np.zeros((ratio, outputs)),
    }


def attention(key: str, ratio: int = 0) -> Tensors:
    """One layer's attention with what compresses its keys by ``ratio``, if anything does."""
    tensors: Tensors = {
        f"{key}.wq_a.weight": np.zeros((Q_RANK, HIDDEN)),
        f"{key}.wkv.weight": np.zeros((HEAD, HIDDEN)),
        f"{key}.wq_b.weight": np.zeros((_HEADS * HEAD, Q_RANK)),
        f"{key}.wo_a.weight": np.zeros((_O_GROUPS * _O_RANK, _HEADS * HEAD // _O_GROUPS)),
        f"{key}.wo_b.weight": np.zeros((HIDDEN, _O_GROUPS * _O_RANK)),
        f"{key}.q_norm.weight": np.ones(Q_RANK),
        f"{key}.kv_norm.weight": np.ones(HEAD),
        f"{key}.attn_sink": np.ones(_HEADS),
    }
    if ratio:
        tensors |= _compressor(f"{key}.compressor", ratio, HEAD)
    if ratio == 4:
        tensors |= _compressor(f"{key}.indexer.compressor", ratio, _INDEX_HEAD)
        tensors[f"{key}.indexer.wq_b.weight"] = np.zeros((_INDEX_HEADS * _INDEX_HEAD, Q_RANK))
        tensors[f"{key}.indexer.weights_proj.weight"] = np.zeros((_INDEX_HEADS, HIDDEN))
    return tensors


def mlp(key: str) -> Tensors:
    """One expert."""
    sizes = {"w1": (_MLP, HIDDEN), "w3": (_MLP, HIDDEN), "w2": (HIDDEN, _MLP)}
    return {f"{key}.{name}.weight": np.zeros(size) for name, size in sizes.items()}


def hyper(key: str, mixes: int = (2 + _STREAMS) * _STREAMS, scales: int = 3) -> Tensors:
    """One hyper-connection."""
    sizes = {"fn": (mixes, _STREAMS * HIDDEN), "base": (mixes,), "scale": (scales,)}
    return {f"{key}_{name}": np.ones(size) for name, size in sizes.items()}


def _tensors() -> Tensors:
    tensors: Tensors = {
        "embed.weight": np.zeros((VOCAB, HIDDEN)),
        "head.weight": np.zeros((VOCAB, HIDDEN)),
        "norm.weight": np.ones(HIDDEN),
        **hyper("hc_head", _STREAMS, 1),
    }
    rng = np.random.default_rng(0)
    for layer, ratio in enumerate(_RATIOS):
        key = f"layers.{layer}"
        tensors |= attention(f"{key}.attn", ratio)
        tensors |= {f"{key}.{name}_norm.weight": np.ones(HIDDEN) for name in ("attn", "ffn")}
        for name in ("attn", "ffn"):
            tensors |= hyper(f"{key}.hc_{name}")
        tensors[f"{key}.ffn.gate.weight"] = np.zeros((_EXPERTS, HIDDEN))
        if layer < _CONFIG["num_hash_layers"]:
            table = np.stack([rng.permutation(_EXPERTS)[:_TOP_K] for _ in range(VOCAB)])
            tensors[f"{key}.ffn.gate.tid2eid"] = table.astype(np.int32)
        else:
            tensors[f"{key}.ffn.gate.bias"] = np.ones(_EXPERTS)
        for expert in range(_EXPERTS):
            tensors |= mlp(f"{key}.ffn.experts.{expert}")
        tensors |= mlp(f"{key}.ffn.shared_experts")
    return tensors


def _choose_clearly(tensors: Tensors) -> None:
    """Keep scores that bfloat16 rounds from choosing other experts in the pack than in the twin."""
    order = np.random.default_rng(1).permutation(_EXPERTS)
    for name in tensors:
        if name.endswith(".gate.bias"):
            tensors[name] = (2.0 * order).astype(np.float32)  # scores differ by less


_BLOCK = 128
_IN_FP8 = re.compile(r"attn\.(wq_a|wkv|wq_b|wo_a|wo_b|indexer\.wq_b)\.weight$|shared_experts\.w[123]\.weight$")


def _in_blocks_of_fp8(tensors: Tensors) -> None:
    """As the source has its linears: fp8 with a scale for each block of 128 by 128."""
    import torch

    _choose_clearly(tensors)
    for name in [name for name in tensors if _IN_FP8.search(name)]:
        weight = torch.from_numpy(tensors[name])
        rows, columns = (size // _BLOCK for size in weight.shape)
        blocks = weight.view(rows, _BLOCK, columns, _BLOCK)
        scale = (blocks.abs().amax(dim=(1, 3)) / 448).log2().ceil().exp2()
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(weight.shape)
        tensors[name] = codes.view(torch.uint8).numpy()
        tensors[name.replace(".weight", ".scale")] = scale.numpy()


_NATIVE = Family(
    "deepseek_v4",
    _CONFIG,
    kind="names of its own, and modules that vLLM reads",
    tensors=_tensors,
    edit=_choose_clearly,
    dense="weights_proj$",  # as exllamav3 leaves it
    slices=_O_GROUPS,  # one for each group of heads, side by side along the outputs
    sliced=r"\.wo_a$",
    shows=("decoded while loading",),
    bound=0.03,  # hyper-connections, attention and its cache on CPUs take bfloat16 and fp8 only
    interpreted=True,
    options={
        **{"dtype": "bfloat16", "block_size": 256, "max_model_len": 512, "max_num_batched_tokens": 512},
        "num_gpu_blocks_override": 1024,
    },
)

DEEPSEEK_V4 = (
    _NATIVE,
    Family(
        "deepseek_v4_routed",
        _CONFIG,
        kind="routed experts alone",
        tensors=_tensors,
        edit=_choose_clearly,
        exl3=r"\.experts\.\d+\.",
        bound=0.03,  # hyper-connections, attention and its cache on CPUs take bfloat16 and fp8 only
        interpreted=True,
        options=_NATIVE.options,
    ),
    Family(
        "deepseek_v4_fp8",
        {**_CONFIG, "expert_dtype": "fp8"},
        kind="other layers in the source's fp8",
        tensors=_tensors,
        edit=_in_blocks_of_fp8,
        exl3=r"\.experts\.\d+\.",
        source={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]},
        experts=[f"model.layers.{layer}.ffn.experts" for layer in range(len(_RATIOS))],
        bound=0.03,  # as above
        interpreted=True,
        options=_NATIVE.options,
    ),
)
