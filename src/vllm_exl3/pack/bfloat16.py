"""Bfloat16 in numpy, which has no such dtype: 16-bit patterns, the upper halves of float32's."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["from_bfloat16", "to_bfloat16"]


def to_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Bit patterns of the bfloat16 nearest to finite values of any shape, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values of bfloat16 bit patterns of any shape."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
