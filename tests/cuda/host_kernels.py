"""Builds kernels of this package for the host: inline PTX becomes calls of the functions in host/ptx.h."""

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from vllm_exl3.cuda.compiler import kernel_sources

__all__ = ["HostKernels", "build"]

HOST = Path(__file__).parent / "host"

ASM = re.compile(r"\basm(?: volatile)?\((?P<code>(?:\s*\"(?:[^\"\\]|\\.)*\")+)(?P<operands>[^;]*)\);")
OPERAND = re.compile(r"\"[=+]?[a-z]\"\((?P<value>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")


def translated(source: str) -> str:
    """A kernel source for the host's compiler."""

    def call(found: re.Match[str]) -> str:
        code = "".join(re.findall(r"\"((?:[^\"\\]|\\.)*)\"", found["code"]))
        if not code:
            return ";"  # it only orders what the device's compiler does
        if code.startswith("{"):
            return 'stop("a sequence of PTX that the host does not know");'
        name = code.replace("::", "__").split()[0].rstrip(";").replace(".", "_")
        values = [operand["value"] for operand in OPERAND.finditer(found["operands"])]
        return f"ptx_{name}({', '.join(values)});"

    # The one array of dynamic shared memory is simt.h's, whatever a kernel calls it.
    source = re.sub(
        r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(::memory);",
        source,
    )
    # So that a program may give every block of a cluster variables of its own.
    source = re.sub(r"__shared__ ((?:__align__\(\d+\) )?)(\w+) (\w+)", r"__shared__ \1SHARED_TYPE(\2) \3", source)
    return ASM.sub(call, source)


class HostKernels:
    """A library of kernels; its functions raise what stopped a kernel, where a crash would end all tests."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._failure = self._library.host_failure
        self._failure.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, name)

        def call(*arguments: object) -> int:
            result: int = function(*arguments)
            if why := self._failure():
                raise AssertionError(f"{name}, or what this library ran before: {why.decode()}")
            return result

        return call


def build(program: str, folder: Path) -> HostKernels:
    """Compile ``host/<program>.cpp`` with the package's kernels."""
    files = {name: translated(text) for name, text in kernel_sources().items()}
    for file in HOST.rglob("*.*"):  # in the place of headers that have no counterpart instruction by instruction, too
        files[file.relative_to(HOST).as_posix()] = file.read_text(encoding="utf-8")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    library = folder / f"{program}.so"
    # A process has a unique symbol once, so that all libraries would share what inline variables hold.
    options = ["-std=c++17", "-O1", "-w", "-fpermissive", "-ffp-contract=off", "-shared", "-fPIC", "-fno-gnu-unique"]
    options.append(f"-I{folder}")
    subprocess.run(["g++", *options, str(folder / f"{program}.cpp"), "-o", str(library)], check=True)
    return HostKernels(library)
