"""Makes a processor with AVX-512 pass for one with AVX2, in this Python and those it starts: ``make test-avx2``.

Python imports this file when its folder is on ``PYTHONPATH``. vLLM picks its library of CPU kernels, and its kernels
for linears, by what torch.cpu says of the processor; torch, oneDNN and this package read variables.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence

os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")  # torch's own kernels, and what Inductor generates
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ.setdefault("VLLM_EXL3_CPU_ISA", "avx2")

_ABSENT = ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16")


class _WithoutAvx512(importlib.abc.MetaPathFinder):
    """Imports torch.cpu as it is, then replaces what it says of the processor."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for feature in _ABSENT:
                if hasattr(module, f"_is_{feature}_supported"):
                    setattr(module, f"_is_{feature}_supported", lambda: False)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WithoutAvx512())
