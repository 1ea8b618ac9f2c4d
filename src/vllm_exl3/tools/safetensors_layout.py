"""Where the tensors of a safetensors file will lie, and the header that says so; for everything that writes packs."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm_exl3.pack.headers import ITEM_BITS

__all__ = ["Layout", "lay_out", "ledger_record", "nbytes"]

_TORCH_NAMES = {
    "BF16": "torch.bfloat16",
    "F16": "torch.float16",
    "F32": "torch.float32",
    "I16": "torch.int16",
    "I32": "torch.int32",
    "I64": "torch.int64",
    "I8": "torch.int8",
    "U8": "torch.uint8",
}


@dataclass(frozen=True)
class Layout:
    """A file that is to be written.

    Attributes:
        header: the bytes it begins with, a multiple of eight.
        starts: name → first byte of the tensor, counted from the beginning of the file.
        nbytes: size of the file.
    """

    header: bytes
    starts: Mapping[str, int]
    nbytes: int


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> Layout:
    """Put tensors back to back.

    Args:
        tensors: name, safetensors dtype code and shape of each, in the order of the file.
        metadata: the strings of ``__metadata__``; none are written if it is empty.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts = {}
    end = 0
    for name, dtype, shape in tensors:
        starts[name], end = end, end + nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor with this safetensors dtype code."""
    return prod(shape) * ITEM_BITS[dtype] // 8


def ledger_record(dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    """What ``stored_tensors`` of ``quantization_config.json`` says of a tensor."""
    return {"shape": list(shape), "n_bytes": nbytes(dtype, shape), "dtype": _TORCH_NAMES[dtype]}
