"""vllm-exl3: serve EXL3 (ExLlamaV3 trellis-quantized) checkpoints with stock vLLM.

Importing this package loads neither torch nor vLLM nor CUDA; ``register`` is what vLLM's
``vllm.general_plugins`` entry point calls in every process it starts.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "register", "runtime_diagnostics"]


def register() -> None:
    """Register the ``exl3`` quantization with vLLM. Idempotent, cheap, and free of CUDA calls.

    Raises:
        RuntimeError: another installed plugin serves EXL3 packs too.
    """
    from vllm_exl3.serving.register import register

    register()


def runtime_diagnostics() -> dict[str, object]:
    """What this process serves and with which kernels, as plain JSON-serialisable values."""
    from vllm_exl3.serving.report import runtime_diagnostics

    return runtime_diagnostics()
