"""Attention over vLLM's int4 KV cache (``--kv-cache-dtype int4_per_token_head``): reference, kernels, dispatch.

Nothing here imports vLLM; `vllm_exl3.serving.kv` puts it behind vLLM's Triton attention backend.
"""
