"""Rows of dense and hybrid families."""

from tests.families.family import Family, sizes

__all__ = ["DENSE"]

_SMALL_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32}

_GATE_UP = {"gate_up_proj": (("gate_proj", 256), ("up_proj", 256))}
_QKV = {"qkv_proj": (("q_proj", 128), ("k_proj", 64), ("v_proj", 64))}


def _head_named_otherwise(name: str) -> str:
    """As DeepSeek V4's."""
    return name.replace("lm_head", "head")


DENSE = (
    Family("llama", sizes("llama")),
    Family("llama_sliced", sizes("llama"), kind="slices", slices=2, shows=("decoded while loading",)),
    Family(
        "falcon",
        sizes(
            "falcon",
            without=("head_dim", "intermediate_size"),
            new_decoder_architecture=True,
            num_kv_heads=2,
            bias=False,
            alibi=False,
        ),
        kind="rows reordered by the loader",
        dense="lm_head",
        shows=("decoded while loading",),
    ),
    Family(
        "bloom",
        {"model_type": "bloom", "hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 640},
        kind="rows reordered by the loader",
        shows=("decoded while loading",),
    ),
    Family("mistral", sizes("mistral", sliding_window=8)),
    Family("ministral", sizes("ministral", sliding_window=8)),
    Family("ministral3", sizes("ministral3")),
    Family("qwen2", sizes("qwen2", without=("head_dim",))),
    Family("qwen3", sizes("qwen3")),
    Family("phi3", sizes("phi3", without=("head_dim",)), kind="unfused on disk", unfused={**_QKV, **_GATE_UP}),
    Family("llama_head", sizes("llama"), kind="another name for the head", rename=_head_named_otherwise),
    Family("gemma2", sizes("gemma2", query_pre_attn_scalar=32), tied=True),
    Family("gemma3_text", sizes("gemma3_text", query_pre_attn_scalar=32, sliding_window=8), tied=True),
    Family(
        "gemma3n_text",
        sizes(
            "gemma3n_text",
            vocab_size_per_layer_input=640,
            hidden_size_per_layer_input=32,
            num_kv_shared_layers=1,
            laurel_rank=16,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            activation_sparsity_pattern=[0.5, 0.0, 0.0],
            intermediate_size=256,
            query_pre_attn_scalar=32,
        ),
        architecture="Gemma3nForCausalLM",
        kind="two embeddings and a tied head",
        tied=True,
    ),
    Family("gemma4_text", sizes("gemma4_text"), architecture="Gemma4ForCausalLM", tied=True),
    Family("glm", sizes("glm")),
    Family("glm4", sizes("glm4"), unfused=_GATE_UP),
    Family("cohere2", sizes("cohere2", without=("head_dim",), sliding_window=8), tied=True),
    Family("ernie4_5", sizes("ernie4_5")),
    Family("olmo2", sizes("olmo2", without=("head_dim",))),
    Family("olmo3", sizes("olmo3", without=("head_dim",), sliding_window=8)),
    Family("smollm3", sizes("smollm3", without=("head_dim",))),
    Family("exaone4", sizes("exaone4", sliding_window=8)),
    Family("granite", sizes("granite", without=("head_dim",))),
    Family("seed_oss", sizes("seed_oss")),
    Family("apertus", sizes("apertus", without=("head_dim",))),
    Family("arcee", sizes("arcee")),
    Family("hunyuan_v1_dense", sizes("hunyuan_v1_dense")),
    Family("starcoder2", sizes("starcoder2", without=("head_dim",))),
    Family("nemotron", sizes("nemotron", without=("head_dim",))),
    Family("falcon_h1", sizes("falcon_h1", mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16)),
    Family(
        "nemotron_h",
        sizes("nemotron_h", layers_block_type=["mamba", "attention", "mlp"], num_hidden_layers=3, **_SMALL_MAMBA),
    ),
    Family(
        "lfm2",
        sizes("lfm2", without=("head_dim",), layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
        published={
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 128,
            "block_ffn_dim_multiplier": 1.0,
        },
        tied=True,
    ),
    Family(
        "bamba",
        sizes("bamba", without=("head_dim",), attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=32),
        gpu="vLLM 0.32 builds it from transformers' class, and refuses the linear attention of that by name",
    ),
)
