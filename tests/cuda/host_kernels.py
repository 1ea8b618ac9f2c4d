"""Builds kernels of this package for the host: inline PTX becomes calls of the functions in host/ptx.h."""

import re
import subprocess
from pathlib import Path

from vllm_exl3.cuda.compiler import kernel_sources

__all__ = ["build"]

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
    return ASM.sub(call, source)


def build(program: str, folder: Path) -> Path:
    """Compile ``host/<program>.cpp`` with the package's kernels; gives the shared library."""
    for name, text in kernel_sources().items():
        (folder / name).write_text(translated(text), encoding="utf-8")
    for file in HOST.iterdir():  # in the place of headers that have no counterpart instruction by instruction, too
        (folder / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    library = folder / f"{program}.so"
    options = ["-std=c++17", "-O1", "-w", "-fpermissive", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, str(folder / f"{program}.cpp"), "-o", str(library)], check=True)
    return library
