"""Llama 4: rows of q and k that vLLM's loader puts in another order, which it cannot do to a trellis.

Meta's weights rotate neighbouring channels of a head, vLLM's kernel the two halves of it. So
``Llama4ForCausalLM.permute_qk_weight_for_rotary`` reorders the rows of ``weight``, ``weight_packed`` and
``weight_scale`` of ``q_proj`` and ``k_proj`` while they are loaded. A trellis mixes 128 rows, so here the layer's
output is reordered instead. Applies to vLLM 0.30 to 0.33; a contract test holds it against vLLM's own function.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_exl3.pack.metadata import architectures, text_config

__all__ = ["is_llama4", "pairs_to_halves", "rotary_heads"]

_CLASSES = frozenset({"Llama4ForCausalLM", "Llama4ForConditionalGeneration", "EagleLlama4ForCausalLM"})
_COUNTS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def is_llama4(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` describes a model whose loader reorders rows."""
    return not _CLASSES.isdisjoint(architectures(config))


def rotary_heads(config: Mapping[str, Any], key: str) -> int:
    """Heads whose rows vLLM would have reordered in a stored module, over all ranks; 0 where it leaves them.

    Args:
        config: the pack's ``config.json``.
        key: the module's name in the checkpoint. The vision tower's attention keeps its order.
    """
    name = _COUNTS.get(key.rpartition(".")[2])
    if name is None or not is_llama4(config) or "vision_model" in key.split("."):
        return 0
    text = text_config(config)
    return int(text.get(name) or text["num_attention_heads"])


def pairs_to_halves(outputs: torch.Tensor, head_size: int) -> torch.Tensor:
    """Heads whose rotated pairs are neighbours, as heads whose first half is rotated with the second.

    Args:
        outputs: ``[tokens, heads·head_size]``.
        head_size: channels of a head, even.
    """
    pairs = outputs.view(outputs.shape[0], -1, head_size // 2, 2)
    return pairs.transpose(2, 3).reshape(outputs.shape)
