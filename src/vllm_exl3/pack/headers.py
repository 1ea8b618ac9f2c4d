"""Safetensors headers: bytes to `StoredTensor`, refusing what no reader could load.

A header says where each tensor lies, so cut files, overlaps and holes show without reading a
single weight. Source: the safetensors format (eight bytes of little-endian length, JSON, data).
"""

import gc
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.json_text import parse_json
from vllm_exl3.pack.stored import StoredTensor

__all__ = ["FIRST_READ", "ITEM_BITS", "FileHeader", "paused_gc", "read_header"]

FIRST_READ = 64 * 1024
"""Bytes of the first read: most headers fit, and the length is known for the second if not."""

MAX_HEADER = 100_000_000
"""Longest header that the safetensors library reads; 288,000 tensors take 35 MB."""

ITEM_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element by safetensors dtype code."""

_INTEGER = frozenset((int,))
_MAX_NAME = 1000
"""Longest name of a tensor: real ones have a tenth of it, and numbers in it stay short enough to be parsed."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What one safetensors file says about itself.

    Attributes:
        file: its name, relative to the pack.
        nbytes: its size.
        tensors: name to tensor, in the header's order.
        metadata: the free-form strings of ``__metadata__``.
    """

    file: str
    nbytes: int
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(file: str, nbytes: int, read: Callable[[int, int], bytes]) -> FileHeader:
    """Read and verify the header of one file.

    Args:
        file: its name, for the tensors and for messages.
        nbytes: its size.
        read: ``read(start, length)`` gives exactly those bytes.

    Raises:
        Exl3PackError: the file is cut, is no safetensors file, or its tensors overlap.
    """
    if nbytes < 8:
        raise _cut(file, f"a file of {nbytes} bytes", "a safetensors file, which starts with an eight-byte length")
    first = read(0, min(FIRST_READ, nbytes))
    (length,) = struct.unpack_from("<Q", first)
    if length > MAX_HEADER:
        raise _cut(file, f"a header length of {length} bytes", f"at most {MAX_HEADER}: this is no safetensors file")
    if 8 + length > nbytes:
        raise _cut(file, f"a header of {length} bytes in a file of {nbytes}", "the header to fit into the file")
    text = first[8 : 8 + length]
    if len(text) < length:
        text += read(len(first), 8 + length - len(first))
    with paused_gc():
        return _parse(file, nbytes, text)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Hold back the cyclic collector: it would scan hundreds of thousands of new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parse(file: str, nbytes: int, text: bytes) -> FileHeader:
    try:
        entries: Any = parse_json(text, constants=False)
    except ValueError as error:
        raise _cut(file, f"a header that is no JSON ({error})", "a safetensors header") from error
    if not isinstance(entries, dict):
        raise _cut(file, f"a header that is a JSON {type(entries).__name__}", "a JSON object of tensors")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken_entry(file, "__metadata__", metadata, "an object of strings")
    base = 8 + len(text)
    tensors: dict[str, StoredTensor] = {}
    furthest, last = 0, ""
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, entry in entries.items():
        if len(name) > _MAX_NAME:
            raise _broken_entry(file, f"{name[:60]}…", entry, f"a name of at most {_MAX_NAME} characters")
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            start, end = entry["data_offsets"]
            # 1, 1.0 and true are equal to Python, so types are compared before sizes are looked up.
            if not _INTEGER.issuperset(map(type, (start, end, *shape))) or start < 0:
                raise ValueError(entry)
            expected = sizes.get((dtype, shape))
            if expected is None:  # a pack of many experts repeats few shapes
                expected = sizes[dtype, shape] = _size(dtype, shape)
            size = end - start
        except (KeyError, TypeError, ValueError) as error:
            raise _broken_entry(file, name, entry) from error
        if size != expected:
            raise Exl3PackError(
                found=f"{size} bytes for {dtype} {list(shape)}",
                expected=f"{expected} bytes",
                where=f"{name} in {file}",
                remedy="The header contradicts itself: fetch the file again or write the pack anew.",
            )
        if end > furthest:
            furthest, last = end, name
        tensors[name] = StoredTensor(name, dtype, shape, file, base + start, expected)
    # In Python's integers: a damaged offset may be too large for the arrays of the next check.
    if base + furthest > nbytes:
        raise _cut(file, f"{nbytes} bytes", f"{base + furthest} bytes, where {last} ends")
    _check_extent(file, nbytes, base, tensors)
    return FileHeader(file, nbytes, tensors, metadata)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor.

    Raises:
        KeyError: the dtype is unknown.
        ValueError: a dimension is negative, or the tensor ends inside a byte.
    """
    size, rest = divmod(math.prod(shape) * ITEM_BITS[dtype], 8)
    if rest or any(dimension < 0 for dimension in shape):
        raise ValueError(shape)
    return size


def _check_extent(file: str, nbytes: int, base: int, tensors: Mapping[str, StoredTensor]) -> None:
    """Tensors must follow each other without overlap or hole and fill the file, as every loader demands."""
    count = len(tensors)
    starts = np.fromiter((tensor.start for tensor in tensors.values()), np.int64, count)
    sizes = np.fromiter((tensor.nbytes for tensor in tensors.values()), np.int64, count)
    order = np.lexsort((sizes, starts))  # empty tensors first where several share a start
    ends = np.concatenate([[base], (starts + sizes)[order]])
    names = list(tensors)
    gaps = starts[order] - ends[:-1]
    if gaps.any():
        at = int(np.flatnonzero(gaps)[0])
        name = names[int(order[at])]
        previous = f"the end of {names[int(order[at - 1])]}" if at else "the end of the header"
        kind = "overlapping tensors" if gaps[at] < 0 else "a hole between tensors"
        raise Exl3PackError(
            found=f"{kind}: it starts at byte {starts[order[at]]}, {abs(int(gaps[at]))} bytes "
            f"{'before' if gaps[at] < 0 else 'after'} {previous}",
            expected="tensors back to back",
            where=f"{name} in {file}",
            remedy="The header is damaged: fetch the file again or write the pack anew.",
        )
    if ends[-1] != nbytes:
        raise _cut(file, f"{nbytes} bytes", f"{ends[-1]} bytes, where the last tensor ends")


def _broken_entry(
    file: str, name: str, entry: object, expected: str = "dtype, shape and data_offsets of a known dtype"
) -> Exl3PackError:
    return Exl3PackError(
        found=f"the header entry {str(entry)[:120]}",
        expected=expected,
        where=f"{name} in {file}",
        remedy="Fetch the file again, or update vllm-exl3 if the dtype is new.",
    )


def _cut(file: str, found: str, expected: str) -> Exl3PackError:
    return Exl3PackError(
        found=found,
        expected=expected,
        where=file,
        remedy="The file is cut or damaged: fetch it again (an interrupted download is the usual cause).",
    )
