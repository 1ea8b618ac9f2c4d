"""The weights of a GGUF file, dequantized, under Hugging Face names."""

from collections.abc import Sequence
from pathlib import Path

from vllm_exl3.demo.smollm2 import read_gguf
from vllm_exl3.pack import Exl3PackError
from vllm_exl3.verify.weights import Floats

__all__ = ["GgufWeights"]


class GgufWeights:
    """A llama model in a GGUF file.

    Args:
        path: the file.

    Raises:
        Exl3PackError: the file is of another architecture, or the package ``gguf`` is missing.
    """

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        try:
            self.model = read_gguf(path)
        except ImportError as error:
            raise _refused(self.label, "no package gguf", "Install it: pip install 'vllm-exl3[demo]'.") from error
        except ValueError as error:
            raise _refused(self.label, str(error), "Compare with the pack's server for other architectures.") from error

    def names(self) -> Sequence[str]:
        """See `vllm_exl3.verify.weights.Weights`."""
        return list(self.model.tensors)

    def read(self, name: str) -> Floats:
        """See `vllm_exl3.verify.weights.Weights`."""
        return self.model.tensors[name]


def _refused(label: str, found: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected="a readable GGUF file of a llama model", where=label, remedy=remedy)
