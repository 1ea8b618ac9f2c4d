"""Registration of the int4 attention with vLLM, by path: nothing of it is imported before vLLM chooses a backend."""

import logging

from vllm_exl3 import env

__all__ = ["register_attention"]

logger = logging.getLogger("vllm.exl3")
_BACKENDS = {
    "TRITON_ATTN": "vllm_exl3.serving.kv.Backend",
    "CPU_ATTN": "vllm_exl3.serving.kv_cpu.CpuAttentionBackend",
}


def register_attention() -> None:
    """Put this package's attention in the place of vLLM's Triton and CPU backends, unless the user turned it off.

    Raises:
        ValueError: an environment variable is set to something it does not take.
    """
    if not env.INT4_KV.get():
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in _BACKENDS.items():
        backend = getattr(AttentionBackendEnum, name, None)
        if backend is None:
            logger.warning("vllm-exl3: this vLLM has no attention backend %s; int4 KV caches are served by vLLM", name)
        elif backend.is_overridden() and backend.get_path() != path:
            logger.warning(
                "vllm-exl3: another plugin has replaced %s with %s; int4 KV caches stay with it",
                name,
                backend.get_path(),
            )
        else:
            register_backend(backend, path)
