"""The table of families: what `transformers` is told to make, and which of it becomes EXL3."""

from typing import Any

from tests.families.family import Family

__all__ = ["FAMILIES"]


def _sizes(model_type: str, **others: Any) -> dict[str, Any]:
    """A model of two small layers; heads of 32, two of four for keys, whose 64 channels a pack pads to 128."""
    return {
        "model_type": model_type,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 640,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **others,
    }


FAMILIES = (
    Family(
        "llama4_text",
        _sizes(
            "llama4_text", intermediate_size_mlp=256, intermediate_size=128, num_local_experts=4,
            interleave_moe_layer_step=2, num_hidden_layers=4,
        ),
        "Llama4ForCausalLM",
        kind="permuted rows",
        stacked="in_out",
    ),
)  # fmt: skip
