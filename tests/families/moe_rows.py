"""Rows of families with routed experts."""

from tests.families.family import Family, sizes

__all__ = ["MOE"]

_MLA = {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_CPU_MLA = {"attention_config": {"backend": "CPU_MLA"}}
"""vLLM's other attention of this kind on CPUs, which some of them prefer, takes no float32."""
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}

MOE = (
    Family(
        "llama4_text",
        sizes(
            "llama4_text",
            intermediate_size_mlp=256,
            num_local_experts=4,
            interleave_moe_layer_step=2,
            num_hidden_layers=4,
        ),
        "Llama4ForCausalLM",
        kind="permuted rows",
        stacked="in_out",
    ),
    Family(
        "minimax_m2",
        sizes("minimax_m2", intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, rotary_dim=16),
        kind="prefixes other than paths",
        # published with sigmoid scores, which vLLM's router for CPUs does not have
        published={"scoring_func": "softmax", "use_routing_bias": True, "use_qk_norm": True},
    ),
    Family(
        "mimo_v2",
        sizes("mimo_v2_flash", v_head_dim=32, sliding_window=8, layer_types=["full_attention", "sliding_attention"],
              mlp_layer_types=["dense", "sparse"], **{**_ROUTED, "n_shared_experts": None}),
        kind="tensors stored scaled",
        published={
            "architectures": ["MiMoV2ForCausalLM"],
            "attention_value_scale": 0.612,
            **{"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "sliding_window_size": 8},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 32},
            **{"layernorm_epsilon": 1e-5, "swa_rope_theta": 10000.0, "rope_theta": 5000000.0},
            **{"partial_rotary_factor": 0.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        },
        scaled={r"self_attn\.o_proj$": 0.612, r"experts\.\d+\.up_proj$": 1 / 128},
    ),
    Family("mixtral", sizes("mixtral", num_local_experts=4, num_experts_per_tok=2)),
    Family(
        "qwen3_moe",
        sizes("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
    ),
    Family(
        "deepseek_v3",
        sizes("deepseek_v3", without=("head_dim",), num_key_value_heads=4, **{**_MLA, **_ROUTED, **_GROUPS}),
        published={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        kind="latent attention",
        options=_CPU_MLA,
    ),
    Family("glm4_moe", sizes("glm4_moe", **_ROUTED, **_GROUPS)),
    Family(
        "glm4_moe_lite",
        sizes("glm4_moe_lite", without=("head_dim",), num_key_value_heads=4, **_MLA, **_ROUTED, **_GROUPS,
              mlp_layer_types=["dense", "sparse"]),
        options=_CPU_MLA,
    ),
    Family("dots1", sizes("dots1", **_ROUTED, **_GROUPS)),
    Family(
        "dots1_router",
        sizes("dots1", **_ROUTED, **_GROUPS),
        kind="decoded while loading",
        also=r"mlp\.gate$",
        shows=("decoded while loading", "decoded weights"),
    ),
    Family("solar_open", sizes("solar_open", **_ROUTED, n_group=1, topk_group=1)),
    Family(
        "ernie4_5_moe",
        sizes("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=128, moe_num_shared_experts=1,
              moe_layer_start_index=1, moe_layer_end_index=1, moe_layer_interval=1),
    ),
    Family(
        "hy_v3",
        sizes("hy_v3", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, num_shared_experts=1,
              first_k_dense_replace=1),
        published={"expert_hidden_dim": 128, "route_norm": True, "qk_norm": True},
    ),
    Family(
        "hunyuan_v1_moe",
        sizes("hunyuan_v1_moe", intermediate_size=128, num_experts=4, moe_topk=2, moe_intermediate_size=128),
    ),
    Family(
        "lfm2_moe",
        sizes("lfm2_moe", without=("head_dim",), layer_types=["conv", "full_attention"], num_dense_layers=1,
              num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
        tied=True,
    ),
    Family("olmoe", sizes("olmoe", without=("head_dim",), num_experts=4, num_experts_per_tok=2)),
    Family("granitemoe", sizes("granitemoe", without=("head_dim",), num_local_experts=4, num_experts_per_tok=2)),
    Family(
        "granitemoehybrid",
        sizes("granitemoehybrid", without=("head_dim",), num_local_experts=4, num_experts_per_tok=2,
              shared_intermediate_size=128, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=32,
              mamba_d_state=16),
    ),
    Family(
        "jamba",
        sizes("jamba", without=("head_dim",), num_experts=4, num_experts_per_tok=2, attn_layer_period=2,
              attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16, mamba_dt_rank=16,
              use_mamba_kernels=False),
        gpu="vLLM has Mamba-1's scan on GPUs only",
    ),
    Family(
        "qwen3_next",
        sizes("qwen3_next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
              shared_expert_intermediate_size=128, **_GDN),
        gpu="vLLM's gated delta network on CPUs takes bfloat16 only",
    ),
)  # fmt: skip
