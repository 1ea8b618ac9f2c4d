"""What vLLM's own kernels need of a machine with a GPU: a C compiler, prebuilt kernels, folders that can be written."""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from vllm_exl3.pack.wording import counted
from vllm_exl3.processors import allowed, measure_others, shortage

__all__ = ["check_compiler", "check_flashinfer", "check_folders", "check_processors"]

_PREBUILT = ("flashinfer-cubin", "flashinfer-jit-cache")
"""Distributions with FlashInfer's kernels; modules of these names with underscores."""


def check_compiler() -> str:
    """The C compiler and header that Triton builds its launchers with.

    Raises:
        RuntimeError: one of them is missing.
    """
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None or not header.exists():
        missing = [name for name, there in (("a C compiler", compiler), ("Python.h", header.exists())) if not there]
        raise RuntimeError(f"{' and '.join(missing)} not found: vLLM's Triton kernels cannot be built")
    return f"{compiler}, {header}"


def check_flashinfer() -> str:
    """Whether FlashInfer's kernels are there, or what happens without: nothing that vLLM cannot serve without."""
    if not _installed("flashinfer"):
        return "not installed; vLLM serves without it"
    found = [name for name in _PREBUILT if _installed(name.replace("-", "_"))]
    if found:
        return f"prebuilt kernels of {' and '.join(found)}"
    toolkit = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    nvcc = shutil.which("nvcc") or next((there for path in toolkit if path and (there := _nvcc(path))), None)
    without = f"installed without {' or '.join(_PREBUILT)}"
    if nvcc is None:
        return f"{without}, and there is no nvcc: where vLLM does not leave it out, set VLLM_USE_FLASHINFER_SAMPLER=0"
    return (
        f"{without}: {nvcc} compiles what is used, for minutes, in the first start; pip install {' '.join(_PREBUILT)}"
    )


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _nvcc(toolkit: str) -> str | None:
    return shutil.which("nvcc", path=str(Path(toolkit) / "bin"))


def check_processors() -> str:
    """How many processors there are for serving on the CPU, how many of them others keep busy, and what helps then."""
    others = measure_others()
    # Threads of a server: its program has none yet.
    note = shortage(allowed(), others)
    busy = "" if others is None else f", of which others keep {others:.1f} busy"
    return f"{counted(allowed(), 'processor')} may be used{busy}" + (f"; {note}" if note else "")


def check_folders() -> str:
    """Whether what the driver, Triton and FlashInfer compile can be kept, or at least put down.

    Raises:
        RuntimeError: naming the folders that cannot be written, and the variables that choose others.
    """
    wrong = [f"{folder} ({variable})" for variable, folder in _folders() if not _can_be_written(folder)]
    if wrong:
        raise RuntimeError(f"cannot be written: {', '.join(wrong)}; set HOME, or these variables, to folders that can")
    return ", ".join(dict.fromkeys(str(folder) for _, folder in _folders()))


def _folders() -> Iterator[tuple[str, Path]]:
    """Where compiled kernels are put, with the variable that says so."""
    home = Path(os.path.expanduser("~"))
    places = [("CUDA_CACHE_PATH", home / ".nv" / "ComputeCache"), ("TRITON_CACHE_DIR", home / ".triton" / "cache")]
    if _installed("flashinfer"):
        places.append(("FLASHINFER_WORKSPACE_BASE", home))
    for variable, default in places:
        yield variable, Path(os.environ.get(variable) or default)


def _can_be_written(folder: Path) -> bool:
    """Whether a folder can be written, or made where it is missing."""
    existing = Path(os.path.abspath(folder))
    while not os.path.lexists(existing):
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
