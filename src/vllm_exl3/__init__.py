"""vllm-exl3: serve EXL3 (ExLlamaV3 trellis-quantized) checkpoints with stock vLLM.

Importing this package loads neither torch nor vLLM nor CUDA; ``register`` is what vLLM's
``vllm.general_plugins`` entry point calls in every process it starts.
"""

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "inspect_exl3_moe_uva_layer",
    "register",
    "register_as_quantpack",
    "runtime_diagnostics",
    "uva_expert_offload_required",
    "validate_exl3_moe_uva_layer",
]

_OFFLOAD = ("inspect_exl3_moe_uva_layer", "uva_expert_offload_required", "validate_exl3_moe_uva_layer")


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
    """The helpers around offloaded experts, which import vLLM when they are first asked for."""
    if name in _OFFLOAD:
        from vllm_exl3.serving import offload

        return getattr(offload, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
