"""Integer embedding tables in numpy: int8 rows with one scale, int4 with one scale for 128 columns.

value = integer · scale in float32. This layout is the project's own (docs/format-embeddings.md); these
functions are its specification, and `dequantize_rows` is what the op is tested against.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.assemble import SCALE_GROUP
from vllm_exl3.pack.bfloat16 import from_bfloat16, to_bfloat16

__all__ = ["SCALE_DTYPE", "dequantize_rows", "quantize_rows", "row_layout"]

Array = npt.NDArray[Any]
Single = npt.NDArray[np.float32]

SCALE_DTYPE = {8: "F32", 4: "BF16"}
"""Safetensors dtype of the scales that are written. Bfloat16 keeps float32's range: small tables do not underflow."""

_DIVISORS = {8: (127.0,), 4: (7.0, -7.5, -8.0, -8.5)}
"""What the largest value of a group is divided by to get its scale. Of several the one with the least error is
taken; a negative one puts the largest value on the side of zero that has one integer more."""


def row_layout(width: int, bits: int) -> tuple[int, int]:
    """Bytes of one stored row, and its scales.

    Args:
        width: hidden size.
        bits: 8 or 4.
    """
    return (width, 1) if bits == 8 else (-(-width // 2), -(-width // SCALE_GROUP))


def quantize_rows(values: Array, bits: int) -> tuple[Array, Single]:
    """Nearest integers and scales of some rows.

    Args:
        values: ``[rows, width]``, finite.
        bits: 8 or 4.

    Returns:
        The table's rows as stored, int8 ``[rows, width]`` or uint8 ``[rows, ceil(width/2)]``, and float32
        scales ``[rows, groups]`` that are exact in the dtype they are stored in.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    rows, width = values.shape
    group = width if bits == 8 else SCALE_GROUP
    groups = -(-width // group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :width] = values
    blocks = padded.reshape(rows, groups, group)
    if not np.isfinite(blocks).all():
        raise ValueError(f"row {int(np.nonzero(~np.isfinite(padded).all(1))[0][0])} holds NaN or infinity")
    integers, scales = _best(blocks, bits)
    flat = integers.reshape(rows, -1)[:, :width]
    return (flat if bits == 8 else _pack_nibbles(flat)), scales


def dequantize_rows(table: Array, scales: Array, width: int) -> Single:
    """Values of some rows.

    Args:
        table: int8 ``[rows, width]`` or uint8 ``[rows, ceil(width/2)]``.
        scales: float ``[rows, groups]``.
        width: hidden size.

    Returns:
        float32 ``[rows, width]``.
    """
    groups = scales.shape[1]
    integers = table if table.dtype == np.int8 else _unpack_nibbles(table)[:, :width]
    of_column = np.zeros(width, np.int64) if groups == 1 else np.arange(width) // SCALE_GROUP
    return integers.astype(np.float32) * scales.astype(np.float32)[:, of_column]


def _best(blocks: Single, bits: int) -> tuple[npt.NDArray[np.int8], Single]:
    """Integers ``[rows, groups, group]`` and scales ``[rows, groups]`` with the least squared error."""
    position = np.abs(blocks).argmax(-1)
    peak = np.take_along_axis(blocks, position[..., None], -1)[..., 0]
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    best: tuple[npt.NDArray[np.int8], Single] | None = None
    least = np.full(peak.shape, np.inf, np.float32)
    for divisor in _DIVISORS[bits]:
        scale = (peak / np.float32(divisor)).astype(np.float32)
        if SCALE_DTYPE[bits] == "BF16":
            scale = from_bfloat16(to_bfloat16(scale))
        # Below float32's normal range a quotient may overflow; such a group is zero for every purpose.
        usable = np.abs(scale) >= np.finfo(np.float32).tiny
        scale = np.where(usable, scale, np.float32(0))
        quotient = blocks / np.where(usable, scale, np.float32(1))[..., None]
        integers = np.clip(np.rint(quotient), low, high).astype(np.int8)
        integers[~usable] = 0
        error = np.square(integers * scale[..., None] - blocks).sum(-1)
        if best is None:
            best = integers, scale
        else:
            better = error < least
            best[0][better], best[1][better] = integers[better], scale[better]
        least = np.minimum(least, error)
    assert best is not None
    return best


def _pack_nibbles(integers: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Two columns a byte, the even one in the low half, each plus 8; an odd width ends with a zero."""
    even = np.zeros((len(integers), -(-integers.shape[1] // 2) * 2), np.int8)
    even[:, : integers.shape[1]] = integers
    nibbles = (even + 8).astype(np.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))


def _unpack_nibbles(packed: Array) -> npt.NDArray[np.int8]:
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).astype(np.int8) - np.int8(8)
    return pairs.reshape(len(packed), -1)
