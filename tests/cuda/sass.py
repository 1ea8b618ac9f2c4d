"""What machine code does in its loops of products: a word put aside once an item costs nothing, one in a loop does."""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

__all__ = ["loops_in_text", "product_loops", "spills_beside_products", "spills_in_text"]

_LINE = re.compile(r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?0x(?P<target>[0-9a-f]+)")
_PRODUCT = re.compile(r"\b[HIQ]G?MMA\b")
_SPILL = re.compile(r"\b(STL|LDL)\b")


def spills_beside_products(image: bytes) -> list[str]:
    """Instructions for local memory in the innermost loops that have products of the tensor cores.

    Args:
        image: a cubin.

    Returns:
        The instructions, each with its address.
    """
    found = spills_in_text(_disassembled(image))
    assert found is not None, "no instruction was recognized in what the disassembler printed"
    return found


def product_loops(image: bytes) -> list[list[str]]:
    """The instructions of each of those loops.

    Args:
        image: a cubin.
    """
    found = loops_in_text(_disassembled(image))
    assert found is not None, "no instruction was recognized in what the disassembler printed"
    return found


def loops_in_text(sass: str) -> list[list[str]] | None:
    """The same of disassembled code; None where nothing in it is an instruction."""
    lines = _lines(sass)
    loops = sorted(_loops(lines))
    return [[text.strip() for at, text in lines if start <= at <= end] for start, end in loops] if lines else None


def spills_in_text(sass: str) -> list[str] | None:
    """The same of disassembled code; None where nothing in it is an instruction."""
    lines = _lines(sass)
    inner = _loops(lines)
    spills = [
        f"{address:#x}: {text}"
        for address, text in lines
        if _SPILL.search(text) and any(start <= address <= end for start, end in inner)
    ]
    return spills if lines else None


def _lines(sass: str) -> list[tuple[int, str]]:
    """(address, instruction) of each line that is one."""
    return [(int(found["address"], 16), found["text"]) for found in _LINE.finditer(sass)]


def _loops(lines: list[tuple[int, str]]) -> set[tuple[int, int]]:
    """First and last address of the innermost loops that have products."""
    loops = [
        (target, address)
        for address, text in lines
        if (branch := _BRANCH.search(text)) and (target := int(branch["target"], 16)) < address
    ]
    around = [
        [loop for loop in loops if loop[0] <= address <= loop[1]] for address, text in lines if _PRODUCT.search(text)
    ]
    inner = {min(each, key=lambda loop: loop[1] - loop[0]) for each in around if each}
    # A round peeled off a loop lies in the next loop outside only, that over work, which may spill.
    return {loop for loop in inner if not any(_inside(other, loop) for other in inner)}


def _inside(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one != other and other[0] <= one[0] and one[1] <= other[1]


def _disassembled(image: bytes) -> str:
    """The SASS, by the disassembler that comes with Triton."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None, "Triton's package has the disassembler"
    tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
