"""What graphs depend on that vLLM compiles of an EXL3 model and keeps between starts."""

import hashlib

from vllm_exl3 import __version__
from vllm_exl3.pack import Pack

__all__ = ["fingerprint"]


def fingerprint(pack: Pack) -> str:
    """This package's version, and a hash of name, dtype and shape of every stored tensor."""
    lines = sorted(f"{tensor.name} {tensor.dtype} {tensor.shape}" for tensor in pack.tensors.values())
    return f"{__version__} {hashlib.sha256(repr(lines).encode()).hexdigest()}"
