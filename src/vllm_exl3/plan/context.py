"""Fit of a context into a machine with one memory, by the arithmetic of an earlier plugin's helpers.

They know one model shape (DeepSeek V4 and GLM-5.3 Flash) and no workspace. `serving_plan.make_plan` reads a pack.
"""

import math
from typing import Any

from vllm_exl3.plan.sizes import GIB

__all__ = ["compute_mla_kv_cache_bytes", "validate_context_scaling"]

WEIGHTS_GB, TOTAL_GB, UTILIZATION, CHUNK = 95.4, 128.0, 0.90, 2048


def compute_mla_kv_cache_bytes(
    context_length: int,
    num_layers: int = 43,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    dtype_bytes: int = 1,
) -> int:
    """Bytes of the latent KV cache of one sequence.

    Args:
        context_length: tokens.
        num_layers: layers with latent attention.
        kv_lora_rank: elements of the latent.
        qk_rope_head_dim: elements of the rotary part.
        dtype_bytes: bytes of an element.

    Raises:
        TypeError: an argument is no whole number.
        ValueError: one is negative, or a size is zero.
    """
    named = {
        "context_length": context_length,
        "num_layers": num_layers,
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "dtype_bytes": dtype_bytes,
    }
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} {value!r}: expected a whole number")
        if value < 0 or (value == 0 and name in ("num_layers", "kv_lora_rank", "dtype_bytes")):
            raise ValueError(f"{name} {value}: expected a positive number")
    return context_length * num_layers * (kv_lora_rank + qk_rope_head_dim) * dtype_bytes


def validate_context_scaling(
    max_model_len: int,
    model_weights_gb: float | None = None,
    total_mem_gb: float | None = None,
    mem_util: float | None = None,
    chunk_size: int | None = None,
) -> dict[str, Any]:
    """Fit of weights and one context into the share of memory that vLLM may take.

    Args:
        max_model_len: tokens of the context.
        model_weights_gb: weights; None for ``VLLM_EXL3_CONTEXT_MODEL_WEIGHTS_GB``, or 95.4.
        total_mem_gb: memory; None for ``VLLM_EXL3_CONTEXT_TOTAL_MEM_GB``, or 128.
        mem_util: share of it; None for ``VLLM_EXL3_CONTEXT_MEM_UTIL``, or 0.9.
        chunk_size: tokens of a prefill chunk; None for ``VLLM_EXL3_CONTEXT_CHUNK_SIZE``, or 2048. Only returned.

    Returns:
        ``max_model_len``, ``kv_cache_gb``, ``model_weights_gb``, ``usable_mem_gb`` (memory times its share),
        ``headroom_gb`` (of that, without weights and cache), ``safety_margin_gb`` (of all memory), ``chunk_size`` and
        ``fits``: whether there is headroom.

    Raises:
        ValueError: a number is out of its domain, or a variable holds what it does not take.
    """
    from vllm_exl3 import env_planning as env

    weights = _chosen(model_weights_gb, env.CONTEXT_MODEL_WEIGHTS_GB.get(), WEIGHTS_GB)
    total = _chosen(total_mem_gb, env.CONTEXT_TOTAL_MEM_GB.get(), TOTAL_GB)
    share = _chosen(mem_util, env.CONTEXT_MEM_UTIL.get(), UTILIZATION)
    chunk = _chosen(chunk_size, env.CONTEXT_CHUNK_SIZE.get(), CHUNK)
    for name, value, good in (
        ("max_model_len", max_model_len, max_model_len > 0),
        ("model_weights_gb", weights, weights >= 0),
        ("total_mem_gb", total, total > 0),
        ("mem_util", share, 0 < share <= 1),
        ("chunk_size", chunk, chunk > 0),
    ):
        if not (math.isfinite(value) and good):
            raise ValueError(f"{name} {value}: out of its domain")
    cache = compute_mla_kv_cache_bytes(max_model_len) / GIB
    usable = total * share
    return {
        "max_model_len": max_model_len,
        "kv_cache_gb": cache,
        "model_weights_gb": weights,
        "usable_mem_gb": usable,
        "headroom_gb": usable - weights - cache,
        "safety_margin_gb": total - weights - cache,
        "chunk_size": int(chunk),
        "fits": usable - weights - cache > 0,
    }


def _chosen(argument: float | None, variable: float | None, default: float) -> float:
    if argument is not None:
        return argument
    return default if variable is None else variable
