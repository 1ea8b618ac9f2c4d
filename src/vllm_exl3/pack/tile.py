"""The trellis tile: how 256 weights of a 16 × 16 tile lie in a ring of 256·K bits.

Position t of the ring owns the 16-bit state that ends with its newest bits; the ring's order is the
register layout of tensor-core fragments, not row by row. Source: the EXL3 format (exllamav3 1.6.5).
"""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.stored import HALF_BITS, TILE

__all__ = ["POSITIONS", "new_bits", "pack_states", "position_of", "row_and_column", "tile_words", "unpack_states"]

POSITIONS = TILE * TILE
"""Weights of one tile."""

_STATE_BITS = 16


def tile_words(half_bits: int) -> int:
    """16-bit words of one tile, 16·K.

    Raises:
        ValueError: 2·K is none that the format knows.
    """
    if half_bits not in HALF_BITS:
        raise ValueError(f"half_bits: found {half_bits}, expected one of {HALF_BITS}")
    return half_bits * TILE // 2


def new_bits(half_bits: int) -> npt.NDArray[np.int64]:
    """Bits that each position adds to the ring, ``[256]``; at half-integer K odd positions add one more."""
    tile_words(half_bits)
    whole, half = divmod(half_bits, 2)
    return whole + half * (np.arange(POSITIONS, dtype=np.int64) & 1)


def row_and_column() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row (input channel) and column (output channel) in the tile of each position, ``[256]`` each."""
    lane, item = np.divmod(np.arange(POSITIONS, dtype=np.int64), 8)
    row = 2 * (lane & 3) + (item & 1) + 8 * (item >> 1 & 1)
    column = (lane >> 2) + 8 * (item >> 2)
    return row, column


def position_of() -> npt.NDArray[np.int64]:
    """Position of each (row, column), ``[16, 16]``."""
    row, column = row_and_column()
    positions = np.empty((TILE, TILE), np.int64)
    positions[row, column] = np.arange(POSITIONS)
    return positions


def unpack_states(trellis: npt.NDArray[Any], half_bits: int, *, row_major: bool = False) -> npt.NDArray[np.uint16]:
    """Read the states of packed tiles.

    Args:
        trellis: ``[..., 16·K]`` 16-bit words (int16 or uint16) as stored.
        half_bits: 2·K.
        row_major: order the states by (row, column) of the tile rather than along the ring.

    Returns:
        ``[..., 256]`` uint16.

    Raises:
        ValueError: the last dimension is not 16·K.
    """
    words = _ring_words(trellis, half_bits)
    index, shift = _windows(half_bits, row_major)
    # Two neighbouring words hold every window, since none is longer than 32 bits.
    pairs = (np.roll(words, 1, axis=-1).astype(np.uint64) << np.uint64(32)) | words
    return (pairs[..., index] >> shift).astype(np.uint16)


def pack_states(states: npt.NDArray[Any], half_bits: int) -> npt.NDArray[np.uint16]:
    """Pack states into tiles, the inverse of `unpack_states`; only each state's newest bits are kept.

    Args:
        states: ``[..., 256]`` along the ring.
        half_bits: 2·K.

    Returns:
        ``[..., 16·K]`` uint16 words as stored.
    """
    count = new_bits(half_bits)
    position = np.repeat(np.arange(POSITIONS), count)
    place = np.cumsum(count)[position] - 1 - np.arange(count.sum())
    bits = (np.asarray(states)[..., position].astype(np.uint16) >> place.astype(np.uint16)) & np.uint16(1)
    packed = np.packbits(bits.astype(np.uint8), axis=-1)
    return packed.view(">u4").astype("<u4").view("<u2")


def _ring_words(trellis: npt.NDArray[Any], half_bits: int) -> npt.NDArray[np.uint32]:
    """Tiles as 32-bit words whose bits, from the top, are the ring's in order."""
    if trellis.shape[-1] != tile_words(half_bits) or trellis.dtype.itemsize != 2:
        raise ValueError(
            f"trellis: found {list(trellis.shape)} of {trellis.dtype}, expected {tile_words(half_bits)} 16-bit words"
        )
    return np.ascontiguousarray(trellis).view("<u4")


@lru_cache
def _windows(half_bits: int, row_major: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Where each state ends: index of the 32-bit word and how far its last bit is from that word's end."""
    last = np.cumsum(new_bits(half_bits)) - 1
    if row_major:
        last = last[position_of().reshape(-1)]
    return last // 32, (31 - last % 32).astype(np.uint64)
