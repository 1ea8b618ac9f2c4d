"""Refusal of the int4 KV cache on CPUs: vLLM 0.31 and 0.32 accept it there and give wrong tokens."""

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

__all__ = ["CpuAttentionBackend"]


class _Impl(CPUAttentionBackendImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if kv_cache_dtype == "int4_per_token_head":
            raise ValueError(
                "--kv-cache-dtype int4_per_token_head needs a GPU: vLLM's CPU attention does not know the format and "
                "would give wrong tokens. Use --kv-cache-dtype auto or fp8."
            )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, *args, **kwargs
        )


class CpuAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU attention, which refuses int4 caches."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """See vLLM."""
        return _Impl
