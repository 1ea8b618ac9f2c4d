"""NVRTC: kernel sources of this package to a cubin for one exact architecture.

No nvcc, no host compiler, no header outside the package, and no GPU: continuous integration compiles every kernel for
every supported architecture.
"""

import functools
import hashlib
import importlib.resources
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ARCHITECTURES", "INCLUDE", "CompileError", "Cubin", "Instance", "compile_instance", "compiler_unavailable"]

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
"""Targets of continuous integration. sm_100a and sm_120a code does not run on sm_103 and sm_121."""

_SERIALISED = tuple(f"C75{number}" for number in range(10, 20))
"""ptxas' notes that it put waits between wgmma instructions; it prints them as information only."""


class CompileError(RuntimeError):
    """A kernel that did not compile: the message carries NVRTC's log."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One kernel instance: a source file and the macros that specialise it.

    Attributes:
        source: its path in ``cuda/kernels``, such as ``gemm/gemm.cu``.
        entry: the kernel's ``extern "C"`` name.
        macros: (name, value) pairs.
    """

    source: str
    entry: str
    macros: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """A short name for progress lines and file names."""
        values = "_".join(re.sub(r"[^0-9A-Za-z]+", "-", value).strip("-") for _, value in self.macros)
        return f"{self.entry}_{values}" if values else self.entry


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one instance.

    Attributes:
        image: the cubin.
        log: NVRTC's and ptxas' verbose log.
    """

    image: bytes
    log: str

    def _numbers(self, pattern: str) -> list[int]:
        return [int(value) for value in re.findall(pattern, self.log)]

    @property
    def registers(self) -> int:
        """Registers a thread of the kernel uses."""
        return max(self._numbers(r"Used (\d+) registers"), default=0)

    @property
    def spill_bytes(self) -> int:
        """Local memory that register spills take, loads and stores."""
        return sum(self._numbers(r"(\d+) bytes spill"))

    @property
    def stack_bytes(self) -> int:
        """Local memory of the kernel's frame: spills, and arrays that are not indexed by constants."""
        return sum(self._numbers(r"(\d+) bytes stack frame"))

    @property
    def serialised(self) -> list[str]:
        """ptxas' notes that wgmma instructions were serialised."""
        return [line for line in self.log.splitlines() if any(code in line for code in _SERIALISED)]


@functools.cache
def kernel_sources() -> dict[str, str]:
    """Every kernel source of the package by its path in ``cuda/kernels``, which is how sources include each other."""
    kernels = importlib.resources.files("vllm_exl3.cuda") / "kernels"
    found = {
        f"{folder.name}/{entry.name}": entry.read_text(encoding="utf-8")
        for folder in kernels.iterdir()
        if folder.is_dir()
        for entry in folder.iterdir()
        if entry.name.endswith((".cu", ".cuh"))
    }
    return dict(sorted(found.items()))


INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
"""An include of a kernel source: the path, from ``cuda/kernels``."""


def included(source: str) -> dict[str, str]:
    """The headers that a kernel source includes, directly or not, by path."""
    sources, found, pending = kernel_sources(), dict[str, str](), [source]
    while pending:
        for name in INCLUDE.findall(sources[pending.pop()]):
            if name not in found:
                found[name] = sources[name]
                pending.append(name)
    return dict(sorted(found.items()))


def compiler_unavailable() -> str | None:
    """Why nothing can be compiled in this process, or None."""
    try:
        compiler_version()
    except ImportError as error:
        return f"cuda-bindings is not importable ({error}); it comes with torch's CUDA wheels"
    except RuntimeError as error:
        return f"NVRTC cannot be loaded ({error}); pip install nvidia-cuda-nvrtc"
    return None


@functools.cache
def compiler_version() -> str:
    """NVRTC's version, such as ``13.0``."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    _check(status)
    return f"{major}.{minor}"


def _options(architecture: str) -> tuple[str, ...]:
    # Without contraction: whether a product and a sum become one rounding must not depend on what they were inlined
    # into, since a row's bits are the same in every instance of a class.
    return (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "-default-device",
        "--fmad=false",
        "--ptxas-options=-v",
    )


def fingerprint(instance: Instance, architecture: str) -> str:
    """SHA-256 over all that decides the machine code: its sources, macros, options, architecture, NVRTC version."""
    headers = included(instance.source)
    parts = [compiler_version(), *_options(architecture), repr(instance), kernel_sources()[instance.source]]
    return _digest(*parts, *(item for pair in headers.items() for item in pair))


def sources_fingerprint(others: Mapping[str, str] | None = None) -> str:
    """SHA-256 over all sources and the options of every architecture, whichever NVRTC compiles them.

    Args:
        others: further sources by name, such as those of kernels in another language.
    """
    sources = {**kernel_sources(), **(others or {})}
    return _digest(*_options("any"), *(item for pair in sorted(sources.items()) for item in pair))


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _check(status: object) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise RuntimeError(str(status))


_load = threading.Lock()


def compile_instance(instance: Instance, architecture: str) -> Cubin:
    """Compile one instance; safe to call from several threads.

    Args:
        instance: what to compile.
        architecture: such as ``sm_90a``; the exact one, since cubins do not run on another.

    Raises:
        CompileError: NVRTC refuses the source or the architecture.
        ImportError: cuda-bindings is missing.
    """
    from cuda.bindings import nvrtc

    with _load:  # the first call loads the library
        compiler_version()
    sources, headers = kernel_sources(), included(instance.source)
    prologue = "".join(f"#define {name} {value}\n" for name, value in instance.macros)
    status, program = nvrtc.nvrtcCreateProgram(
        (prologue + "#line 1\n" + sources[instance.source]).encode(),
        instance.source.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    _check(status)
    try:
        options = [option.encode() for option in _options(architecture)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if int(status) != 0:
            raise CompileError(_failure(instance, architecture, log))
        return Cubin(_fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _failure(instance: Instance, architecture: str, log: str) -> str:
    """Why a kernel did not compile, and what to do where that is known."""
    if "--gpu-architecture" in log:
        return (
            f"NVRTC {compiler_version()} does not know {architecture}, which {instance.label} is compiled for: install "
            f"a newer one (pip install --upgrade nvidia-cuda-nvrtc)\n{log}"
        )
    return f"{instance.label} for {architecture} does not compile with NVRTC {compiler_version()}:\n{log}"


def _fetch(size_of: object, copy: object, program: object) -> bytes:
    status, size = size_of(program)  # type: ignore[operator]
    _check(status)
    # The library writes into it. A bytes object would not do: Python shares those of one byte, as an empty log is.
    buffer = bytearray(size)
    (status,) = copy(program, buffer)  # type: ignore[operator]
    _check(status)
    return bytes(buffer)
