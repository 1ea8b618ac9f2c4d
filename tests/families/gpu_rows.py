"""Rows of families whose classes vLLM has on GPUs only; ``benchmarks/gpu_families.py`` compares them.

Every token goes to all experts, so that a score that rounds otherwise cannot choose others in the pack than in the
twin. Most of these classes compute in bfloat16 whatever the model's type is, and their bound is that of bfloat16.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from tests.families.deepseek_v4_rows import DEEPSEEK_V4
from tests.families.deepseek_v41_rows import DEEPSEEK_V41
from tests.families.dense_rows import DENSE
from tests.families.family import Family, Tensors, sizes
from tests.families.moe_rows import MOE

__all__ = ["GPU"]

_TEXT = {key: value for key, value in sizes("").items() if key != "model_type"}
_BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
_HALF: dict[str, Any] = {"dtype": "float16"}
_DEEPSEEK: dict[str, Any] = {"num_gpu_blocks_override": None}
"""Their rows' options are for CPUs, where the cache has no other limit."""

_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
_BOUND = 0.03
"""Of bfloat16's rounding in a few layers, those of the twin's weights among it; what is wrong is far beyond it."""

_TRITON: dict[str, Any] = {
    **_BFLOAT16,
    "additional_config": {"gdn_prefill_backend": "triton", "kda_prefill_backend": "triton"},
}
"""The kernels in vLLM itself, for those of packages that compile theirs at the first prompt."""

_HALF_BOUND = 5e-3
_TOWER = r"visual|vision|mlp1|sound"

_KDA = {
    "head_dim": 128,
    "num_heads": 2,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 2],
    "full_attn_layers": [3],
}
_KIMI: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "mla_use_nope": True,
    "linear_attn_config": _KDA,
}


_MIMO = sizes(
    "mimo_v2_flash",
    head_dim=192,
    v_head_dim=128,
    sliding_window=128,
    layer_types=["full_attention", "sliding_attention"],
    mlp_layer_types=["dense", "sparse"],
    **_ROUTED,
)
_MIMO_PUBLISHED: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 128,
    "layernorm_epsilon": 1e-5,
    "swa_rope_theta": 10000.0,
    "rope_theta": 5000000.0,
    "partial_rotary_factor": 0.334,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _mimo_sinks(tensors: Tensors) -> None:
    """Give the sliding layer its sinks, if transformers gave it none."""
    tensors["model.layers.1.self_attn.attention_sink_bias"] = np.linspace(-1, 1, 4, dtype=np.float32)


def _kimi_as_published(tensors: Tensors) -> None:
    """Name the MLP of a dense layer as on the Hub: transformers gives it the name of routed experts' block."""
    for name in [name for name in tensors if ".block_sparse_moe." in name and name.split(".")[4] in _MLP]:
        tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(name)


def _olmo_as_published(tensors: Tensors) -> None:
    """Name the norms as vLLM and exllamav3 do, and cut the convolution at its heads.

    transformers saves the names of before its class was published, and cuts the convolution into three equal parts.
    """
    norms = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for old, new in norms.items():
        for name in [name for name in tensors if f".{old}." in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)
    for name in [name for name in tensors if re.search(r"\.(q_)?conv1d\.weight$", name)]:
        base = re.sub(r"(q_)?conv1d\.weight$", "", name)
        names = [f"{base}{part}_conv1d.weight" for part in "qkv"]
        whole = tensors.pop(name) if name not in names else np.concatenate([tensors[part] for part in names])
        sizes = [tensors[f"{base}{part}_proj.weight"].shape[0] for part in "qkv"]
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        tensors |= dict(zip(names, parts, strict=True))


def _flint() -> Tensors:
    """Two layers, the first with a sliding window; both of experts."""
    hidden, heads, kv_heads, head, wide = 128, 4, 2, 128, 128
    mlp = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    attention = {
        "q_proj": (heads * head, hidden),
        "k_proj": (kv_heads * head, hidden),
        "v_proj": (kv_heads * head, hidden),
        "o_proj": (hidden, heads * head),
    }
    tensors: Tensors = {f"{name}.weight": np.zeros((640, hidden)) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = np.ones(hidden)
    for layer in range(2):
        key = f"model.layers.{layer}"
        tensors |= {f"{key}.{name}_layernorm.weight": np.ones(hidden) for name in ("input", "post_attention")}
        tensors |= {f"{key}.self_attn.{name}.weight": np.zeros(size) for name, size in attention.items()}
        tensors |= {f"{key}.self_attn.{name}_norm.weight": np.ones(head) for name in "qk"}
        tensors[f"{key}.self_attn.softmax_offset"] = np.ones(heads)
        tensors[f"{key}.mlp.gate.weight"] = np.zeros((4, hidden))
        for expert in ("shared_expert", *(f"experts.{index}" for index in range(4))):
            tensors |= {f"{key}.mlp.{expert}.{name}.weight": np.zeros(size) for name, size in mlp.items()}
    return tensors


_MLP = ("gate_proj", "up_proj", "down_proj")

GPU = (
    Family(
        "kimi_linear",
        sizes(
            "kimi_linear",
            without=("head_dim", "num_key_value_heads"),
            num_hidden_layers=3,
            num_key_value_heads=4,
            num_local_experts=4,
            num_experts_per_tok=4,
            moe_intermediate_size=128,
            n_shared_experts=1,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            linear_attn_config=_KDA,
            first_k_dense_replace=1,
        ),
        published=_KIMI,
        edit=_kimi_as_published,
        options=_TRITON,
        variables={"VLLM_KIMI_K3_GEMM_AR": "0"},  # whose module imports cutlass' DSL, on one GPU too
        bound=_BOUND,
    ),
    Family(
        "laguna",
        sizes(
            "laguna",
            num_hidden_layers=2,
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=4,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            sliding_window=64,
            layer_types=["full_attention", "sliding_attention"],
        ),
        options=_HALF,
        bound=_HALF_BOUND,
    ),
    Family(
        "olmo_hybrid",
        sizes(
            "olmo_hybrid",
            without=("head_dim",),
            num_key_value_heads=4,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=128,
            layer_types=["linear_attention", "full_attention"],
        ),
        edit=_olmo_as_published,
        dense=r"linear_attn\.[ab]_proj$",
        options=_BFLOAT16,
        bound=_BOUND,
    ),
    Family(
        "flint",
        {
            **{key: value for key, value in sizes("flint").items() if key != "pad_token_id"},
            "architectures": ["FlintForCausalLM"],
            "head_dim": 128,
            "layer_types": ["sliding_attention", "full_attention"],
            "no_rope_layer_indices": [1],
            "sliding_window": 65,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 4,
        },
        tensors=_flint,
        needs=("flashinfer",),
        options={**_BFLOAT16, "attention_config": {"backend": "FLASHINFER"}},
        bound=_BOUND,
    ),
    Family("mimo_v2_flash", _MIMO, published=_MIMO_PUBLISHED, options=_HALF, bound=_HALF_BOUND),
    Family(
        "mimo_v2",
        _MIMO,
        published={
            **_MIMO_PUBLISHED,
            "architectures": ["MiMoV2ForCausalLM"],
            "attention_value_scale": 0.612,
            "add_swa_attention_sink_bias": True,
        },
        edit=_mimo_sinks,
        scaled={r"self_attn\.o_proj$": 0.612, r"experts\.\d+\.up_proj$": 1 / 128},
        options=_HALF,
        bound=_HALF_BOUND,
    ),
    Family(
        "glm5_next",
        {
            "model_type": "glm5_next",
            "text_config": {
                **{key: value for key, value in _TEXT.items() if key != "head_dim"},
                **_ROUTED,
                "num_hidden_layers": 3,
                "num_key_value_heads": 4,
                "n_shared_experts": 1,
                "kv_lora_rank": 512,
                "q_lora_rank": 128,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
                "index_topk": 2048,
                "index_n_heads": 32,
                "linear_num_heads": 2,
                "layer_types": ["linear_attention", "linear_attention", "full_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "indexer_types": ["full", "full", "full"],
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "mhc": True,
                "mla_use_nope": True,
                "num_nextn_predict_layers": 0,
                "indexer_rope_interleave": True,
            },
            "vision_config": {
                **{"depth": 1, "hidden_size": 128, "num_heads": 2, "intermediate_size": 128},
                **{"out_hidden_size": 128, "projection_intermediate_size": 128, "image_size": 56},
            },
        },
        architecture="Glm5NextForConditionalGeneration",
        needs=("DeepGEMM", "tilelang"),
        unused=("torchvision",),
        dense=_TOWER,
        options={**_TRITON, "limit_mm_per_prompt": {"image": 0, "video": 0}},
        bound=_BOUND,
    ),
    Family(
        "qwen4_exp",
        {
            "model_type": "qwen4_exp",
            "text_config": {
                **_TEXT,
                "hidden_size": 256,
                "head_dim": 256,  # of which a quarter is rotated, for the fused kernel of its indexer
                "num_hidden_layers": 2,
                "num_experts": 4,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 128,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "layer_types": ["linear_attention", "full_attention"],
                "output_gate_type": "silu",
                "hc_count": 4,
                "hc_lowrank": 64,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 128,
                "indexer_budget": 2048,
                "indexer_compress_ratio": 16,
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
                    **{"mrope_section": [16, 8, 8], "mrope_interleaved": True},
                },
            },
            "vision_config": {
                **{"depth": 1, "hidden_size": 128, "num_heads": 2, "intermediate_size": 128},
                **{"out_hidden_size": 256, "num_position_embeddings": 64, "deepstack_visual_indexes": []},
            },
        },
        architecture="Qwen4ExpForConditionalGeneration",
        unused=("torchvision",),
        # vLLM's own linears, as for more tokens, in place of a kernel in cutlass' DSL
        constants={"vllm.models.qwen4_exp.nvidia.hyperconnection:MAX_FUSED_M": 0},
        dense=_TOWER,
        options={**_TRITON, "limit_mm_per_prompt": {"image": 0, "video": 0}},
        bound=_BOUND,
    ),
    Family(
        "nemotron_h_moe",
        sizes(
            "nemotron_h",
            layers_block_type=["mamba", "attention", "moe"],
            num_hidden_layers=3,
            mamba_num_heads=8,
            mamba_head_dim=64,
            ssm_state_size=64,
            n_groups=2,
            chunk_size=128,
            n_shared_experts=1,
            moe_shared_expert_intermediate_size=128,
            **_ROUTED,
        ),
        options=_HALF,
        bound=_HALF_BOUND,
    ),
    *(replace(row, gpu="", options=_HALF, bound=_HALF_BOUND) for row in MOE if row.name == "jamba"),
    *(replace(row, gpu="", options=_TRITON, bound=_BOUND) for row in MOE if row.name == "qwen3_next"),
    *(
        replace(row, interpreted=False, options={**row.options, **_DEEPSEEK}, needs=("DeepGEMM", "tilelang"))
        for row in (*DEEPSEEK_V4, *DEEPSEEK_V41)
    ),
    *(replace(row, options=_HALF, bound=_HALF_BOUND) for row in DENSE if row.name == "llama"),
)
