"""The widths a model really has, behind the widths that a pack stores.

A pack pads every width to a multiple of 128 and does not record the original; config.json does.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_exl3.pack.metadata import text_config
from vllm_exl3.pack.stored import pad_to_block

__all__ = ["ROW_LEAVES", "expert_top_k", "head_dim", "input_width", "number", "output_width"]

ATTENTION_OUTPUTS = ("o_proj", "out_proj", "wo", "o_b_proj", "dense")
MLP_OUTPUTS = ("down_proj", "w2", "fc2", "dense_4h_to_h", "linear_fc2", "c_proj")
ROW_LEAVES = ATTENTION_OUTPUTS + MLP_OUTPUTS
"""Last name component of the linears whose inputs vLLM splits over tensor-parallel ranks."""

_MLP_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "ffn_hidden_size",
    "expert_ffn_hidden_size",
)
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_heads")
_HEAD_WIDTHS = ("head_dim", "global_head_dim", "v_head_dim")
_PAIRS = (
    ("linear_num_value_heads", "linear_value_head_dim"),
    ("linear_num_key_heads", "linear_key_head_dim"),
    ("n_shared_experts", "moe_intermediate_size"),
    ("mamba_num_heads", "mamba_head_dim"),
)


def number(config: Mapping[str, Any], *names: str) -> int:
    """The first of these entries that is a positive integer, or 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def head_dim(text: Mapping[str, Any]) -> int:
    """Elements of an attention head: as given, or the hidden size divided by the heads; 0 if neither is given.

    Args:
        text: the part of config.json that describes the language model.
    """
    heads = number(text, "num_attention_heads")
    return number(text, "head_dim") or (number(text, "hidden_size") // heads if heads else 0)


def expert_top_k(config: Mapping[str, Any]) -> int:
    """Experts that serve a token, or 0.

    Args:
        config: config.json.
    """
    return number(text_config(config), "num_experts_per_tok", "moe_topk", "num_experts_per_token", "top_k_experts")


def input_width(leaf: str, stored: int, config: Mapping[str, Any]) -> int:
    """Inputs that the model gives to a linear, from its stored (padded) inputs.

    Args:
        leaf: last component of the linear's key.
        stored: its ``in_features``.
        config: config.json.
    """
    text = text_config(config)
    if leaf in ATTENTION_OUTPUTS:
        return _unpad(stored, _attention_widths(text))
    if leaf in MLP_OUTPUTS:
        return _unpad(stored, _mlp_widths(text))
    return _unpad(stored, [number(text, "hidden_size")])


def output_width(leaf: str, stored: int, config: Mapping[str, Any]) -> int:
    """Outputs that the model takes from a linear, from its stored (padded) outputs."""
    text = text_config(config)
    if leaf == "lm_head":
        return _unpad(stored, [number(text, "vocab_size")])
    if leaf in ROW_LEAVES:
        return _unpad(stored, [number(text, "hidden_size")])
    return _unpad(stored, [*_attention_widths(text), *_mlp_widths(text)])


def _unpad(stored: int, widths: Sequence[int]) -> int:
    """The width that pads to ``stored``; ``stored`` itself when it is one, or when none or several fit."""
    fitting = {width for width in widths if width and pad_to_block(width) == stored}
    return fitting.pop() if len(fitting) == 1 else stored


def _mlp_widths(text: Mapping[str, Any]) -> list[int]:
    sizes = [number(text, name) for name in _MLP_SIZES]
    return [*sizes, number(text, "n_shared_experts") * number(text, "moe_intermediate_size")]


def _attention_widths(text: Mapping[str, Any]) -> list[int]:
    return list(_products(text))


def _products(text: Mapping[str, Any]) -> Iterator[int]:
    width = head_dim(text)
    for count in _HEAD_COUNTS:
        yield number(text, count) * width
        yield from (number(text, count) * number(text, width) for width in _HEAD_WIDTHS)
    yield from (number(text, count) * number(text, width) for count, width in _PAIRS)
