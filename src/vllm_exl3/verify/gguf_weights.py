"""The weights of a GGUF file, dequantized, under Hugging Face names."""

from pathlib import Path

from vllm_exl3.demo.smollm2 import read_gguf
from vllm_exl3.pack import Exl3PackError
from vllm_exl3.verify.weights import LoadedTensors

__all__ = ["gguf_weights"]


def gguf_weights(path: Path) -> LoadedTensors:
    """A llama model in a GGUF file.

    Args:
        path: the file.

    Raises:
        Exl3PackError: the file is damaged or of another architecture, or the package ``gguf`` is missing.
        OSError: it cannot be read.
    """
    try:
        return LoadedTensors(str(path), read_gguf(path).tensors)
    except ImportError as error:
        raise _refused(str(path), "no package gguf", "Install it: pip install 'vllm-exl3[demo]'.") from error
    except (OSError, MemoryError):
        raise
    except ValueError as error:
        raise _refused(str(path), str(error), "Compare with the pack's server for other architectures.") from error
    except Exception as error:  # the package checks little: what a damaged file raises depends on where it is damaged
        found = f"a file that cannot be read ({type(error).__name__}: {error})"
        raise _refused(str(path), found, "Fetch it again.") from error


def _refused(label: str, found: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected="a readable GGUF file of a llama model", where=label, remedy=remedy)
