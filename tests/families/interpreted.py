"""Lets vLLM's CPU class of DeepSeek V4 run without a Triton for CPUs: its few kernels of metadata are interpreted.

To be imported before vLLM. vLLM's wheel for CPUs is built for triton-cpu, which no package index has; Triton's own
interpreter computes the same in Python. In vLLM 0.32 one metadata builder of that class lacks a key besides.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

__all__ = ["complete_metadata"]


class _Interpreter:
    """The parts of a driver that vLLM uses."""

    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = SimpleNamespace(driver=_Interpreter)  # vLLM disables Triton without this name


def complete_metadata() -> None:
    """Give the class' metadata builder the key that vLLM 0.32 reads and does not set; no kernel for CPUs uses it."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import sparse_swa

    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    stock = builder.build_tile_scheduler
    missing = {getattr(sparse_swa, name): None for name in vars(sparse_swa) if name.startswith("_LAYER_TYPE_")}
    builder.build_tile_scheduler = lambda self, tokens: {**missing, **stock(self, tokens)}
