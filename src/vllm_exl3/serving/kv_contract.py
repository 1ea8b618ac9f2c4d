"""What `vllm_exl3.serving.kv` relies on in vLLM's Triton attention backend, checked when the backend is chosen."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from vllm_exl3.attention.layout import content_bytes, rotation_signs

__all__ = ["mismatches"]

_METADATA = {
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "seq_lens",
    "block_table",
    "causal",
    "mm_prefix_range_tensor",
    "rswa_prefix_lens",
}
_COMMON = {"num_reqs", "max_query_len", "query_start_loc_cpu", "seq_lens_cpu_upper_bound"}
_FORWARD = ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"]
_UPDATE = ["layer", "key", "value", "kv_cache", "slot_mapping"]
_BUILD = ["common_prefix_len", "common_attn_metadata", "fast_build"]
_IMPL = ["num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"]


def mismatches() -> list[str]:
    """What is not as expected, in words; empty where the backend fits."""
    try:
        return [text for check in (_interfaces, _layout, _rotation) for text in check()]
    except Exception as error:  # whatever vLLM's internals do now, its own kernels can still serve
        return [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]


def _interfaces() -> list[str]:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import triton_attn

    found = []
    for owner, name, wanted in (
        (triton_attn.TritonAttentionImpl, "__init__", _IMPL),
        (triton_attn.TritonAttentionImpl, "forward", _FORWARD),
        (triton_attn.TritonAttentionImpl, "do_kv_cache_update", _UPDATE),
        (triton_attn.TritonAttentionImpl, "_ensure_scale_caches", ["kv_cache"]),
        (triton_attn.TritonAttentionMetadataBuilder, "build", _BUILD),
    ):
        names = _parameters(getattr(owner, name))
        if names[: len(wanted)] != wanted:
            found.append(f"{owner.__name__}.{name} takes {names}")
    for owner, needed in ((triton_attn.TritonAttentionMetadata, _METADATA), (CommonAttentionMetadata, _COMMON)):
        if lacking := needed - {field.name for field in dataclasses.fields(owner)}:
            found.append(f"{owner.__name__} lacks {', '.join(sorted(lacking))}")
    if triton_attn.TritonAttentionBackend.forward_includes_kv_cache_update:
        found.append("TritonAttentionBackend writes the cache inside forward")
    return found


def _layout() -> list[str]:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=128,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD,
    )
    content = TritonAttentionBackend.customize_spec(spec).state_content_bytes
    return [] if content == content_bytes(128) else [f"a slot of 128 has {content} bytes, not {content_bytes(128)}"]


def _rotation() -> list[str]:
    from vllm.v1.attention.ops import int4_per_token_head

    # Only the signs: vLLM's transform itself runs on a GPU alone, where one is present.
    signs = int4_per_token_head._get_rht_signs(64, 0, torch.device("cpu"))
    return [] if torch.equal(signs, rotation_signs(64)) else ["the signs of its Hadamard transform differ"]


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]
