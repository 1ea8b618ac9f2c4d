"""Registers the native CUDA kernels, and exllamav3's where installed, as backends of the ops."""

import torch

from vllm_exl3.cuda.compiler import compiler_unavailable
from vllm_exl3.ops.backends import Backend, register_backend

__all__ = ["unavailable", "unsupported_device"]


def unsupported_device() -> str | None:
    """Why a visible CUDA device cannot run the kernels, naming it; None where all can."""
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            return (
                f"cuda:{index} {torch.cuda.get_device_name(index)} has compute capability {major}.{minor}; "
                "EXL3 kernels need 8.0 or later (CUDA_VISIBLE_DEVICES leaves it out)"
            )
    return None


def unavailable() -> str | None:
    """Why the native kernels cannot run in this process, or None."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return unsupported_device() or compiler_unavailable()


def _register() -> None:
    from vllm_exl3.cuda import dequantize, exllamav3, fused_linear, linear, moe, moe_by_expert, reconstruct

    native = Backend("linear", "cuda", "native", linear.linear, unavailable, linear.prepare, fused_linear.FUSED)
    register_backend(native)
    register_backend(Backend("linear", "cuda", "exllamav3", exllamav3.linear, exllamav3.unavailable))
    register_backend(Backend("linear", "cuda", "reconstruct", reconstruct.linear, unavailable, reconstruct.prepare))
    register_backend(Backend("moe", "cuda", "native", moe.moe, unavailable, moe.prepare))
    register_backend(Backend("moe", "cuda", "exllamav3", moe_by_expert.moe_exllamav3, exllamav3.unavailable))
    register_backend(Backend("dequantize", "cuda", "native", dequantize.dequantize, unavailable))


_register()
