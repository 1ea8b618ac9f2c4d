"""vllm-exl3: serve EXL3 (ExLlamaV3 trellis-quantized) checkpoints with stock vLLM.

Importing this package loads neither torch nor vLLM nor CUDA; ``register`` is what vLLM's
``vllm.general_plugins`` entry point calls in every process it starts.
"""

__version__ = "0.1.0"

_PLANNING = {
    "CpuOffloadPlan": "exllamav3_offload",
    "DeepseekV41Plan": "deepseek_v41",
    "GroupedPrefillPlan": "prefill_windows",
    "compute_mla_kv_cache_bytes": "context",
    "filter_speculative_candidates": "speculation",
    "get_speculative_draft_tokens": "speculation",
    "is_adaptive_verification_enabled": "speculation",
    "parse_speculative_schedule": "speculation",
    "plan_deepseek_v41": "deepseek_v41",
    "plan_exllamav3_cpu_offload": "exllamav3_offload",
    "plan_grouped_prefill": "prefill_windows",
    "validate_context_scaling": "context",
}
"""Helpers by module of ``vllm_exl3.plan``, none of which imports torch."""

_OFFLOAD = (
    "UvaExpertLayerStatus",
    "inspect_exl3_moe_uva_layer",
    "uva_expert_offload_required",
    "validate_exl3_moe_uva_layer",
)
"""Helpers around offloaded experts, which import vLLM."""

__all__ = ["__version__", "register", "register_as_quantpack", "runtime_diagnostics", *_PLANNING, *_OFFLOAD]  # noqa: PLE0604


def register() -> None:
    """Register the ``exl3`` quantization with vLLM. Idempotent, cheap, and free of CUDA calls.

    Raises:
        RuntimeError: another installed plugin serves EXL3 packs too.
    """
    from vllm_exl3.serving.register import register

    register()


def register_as_quantpack() -> None:
    """Do the same where ``VLLM_PLUGINS`` names ``quantpack``; the entry point of that name.

    Raises:
        RuntimeError: that plugin is installed too.
    """
    from vllm_exl3.serving.register import register_as_quantpack

    register_as_quantpack()


def runtime_diagnostics() -> dict[str, object]:
    """What this process serves and with which kernels, as plain JSON-serialisable values."""
    from vllm_exl3.serving.diagnostics import runtime_diagnostics

    return runtime_diagnostics()


def __getattr__(name: str) -> object:
    """The helpers, which are imported when they are first asked for."""
    if name in _PLANNING:
        import importlib

        return getattr(importlib.import_module(f"vllm_exl3.plan.{_PLANNING[name]}"), name)
    if name in _OFFLOAD:
        from vllm_exl3.serving import offload

        return getattr(offload, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted({*globals(), *__all__})
