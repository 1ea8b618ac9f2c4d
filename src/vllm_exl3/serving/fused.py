"""Outputs of fused layers that vLLM's classes handle in their own way: repeated on every rank, or only there to align.

Which they are is not in a layer's interface, so the classes are known here by the attributes that they set. Applies to
vLLM 0.30 to 0.33; a contract test holds the repeated ones against vLLM's own loaders.
"""

from collections.abc import Sequence

import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from vllm_exl3.pack.parts import Part

__all__ = ["built_parts", "padding_outputs", "whole_outputs"]

_INDEXER = "indexer.index_qk_proj"
"""What Qwen3.8-Flash-Next's attention computes beside q, k and v; since vLLM 0.32 in one layer with them."""

_PADDED = "input_mix_weight_down_block_inject"
"""Qwen3.8-Flash-Next's hyper-connections: the down projection, the injection, and rows that fill up to 16."""


def whole_outputs(layer: torch.nn.Module) -> frozenset[int]:
    """Outputs that every rank holds whole although the layer's others are split.

    Kimi's and GLM-5.3's gated delta attention name theirs; Qwen3.8-Flash-Next's indexer lies behind q, k and v, and
    the shared key of MiniMax-M3's indexer behind its queries, which are split as k and v are.

    Args:
        layer: a ``LinearBase``.
    """
    if hasattr(layer, "total_num_index_heads"):
        return frozenset((4,))
    if isinstance(layer, MergedColumnParallelLinear) and hasattr(layer, "num_kv_head_replicas"):
        return frozenset((3,))
    one = getattr(layer, "replicated_shard_id", None)
    return frozenset(getattr(layer, "replicated_shard_ids", () if one is None else (one,)))


def padding_outputs(layer: torch.nn.Module) -> int:
    """How many of a layer's last outputs no checkpoint fills.

    Kimi K3 fills its fused projection (q, k, v, g, f_a and b) up to 16 rows a rank, which takes a seventh output.

    Args:
        layer: a ``LinearBase``, built or being built.
    """
    outputs = len(getattr(layer, "output_sizes", ()))
    kimi = getattr(layer, "replicated_shard_id", None) is not None and outputs == 7
    qwen = str(getattr(layer, "prefix", "")).rpartition(".")[2] == _PADDED and outputs == 3
    return int(kimi or qwen)


def built_parts(layer: torch.nn.Module, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Those of the stored tensors that a layer of this name takes.

    Qwen3.8-Flash-Next's class first builds q, k and v alone, under the name of the layer that then takes their place
    and the indexer's too.

    Args:
        layer: a ``LinearBase``, being built.
        parts: all tensors that its name stands for, in the order in which vLLM's mapping fuses them.
    """
    if type(layer) is QKVParallelLinear and len(parts) == 4 and parts[3].key.endswith(f".{_INDEXER}"):
        return tuple(parts[:3])
    return tuple(parts)
