"""The EXL3 codecs in numpy: the executable specification that every kernel is tested against.

y = ((x·suh) H W H)·svh, with W decoded from the trellis and H the 128-channel Hadamard transform;
row-coded tables (token and n-gram embeddings) use the mul1 codebook on rings of their own bit
order. Source: the EXL3 format (exllamav3 1.6.5).
"""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.pack.assemble import MARKERS, RING_GROUP, RING_NGRAM
from vllm_exl3.pack.stored import BLOCK, TILE, Codebook
from vllm_exl3.pack.tile import unpack_states

__all__ = [
    "codebook_table",
    "decode",
    "decode_embedding",
    "decode_ngram",
    "decode_states",
    "dense_weight",
    "hadamard",
    "transform_blocks",
    "unpack_rings",
    "unpack_signs",
]

Half = npt.NDArray[np.float16]
Double = npt.NDArray[np.float64]

_INST3_FACTOR, _INST3_OFFSET = 89226354, 64248484
_LOW_WORD = np.uint32(0xFFFF)
_STEP_BYTES = 1 << 24
"""Bytes of states decoded at a time, so that the temporaries stay near the size of a cache."""


@lru_cache
def codebook_table(codebook: Codebook) -> Half:
    """The weight of every 16-bit state, float16 ``[65536]``."""
    states = np.arange(1 << 16, dtype=np.uint32)
    if codebook is Codebook.MUL1:
        return _byte_sums(states * np.uint32(MARKERS["mul1"][1]))
    if codebook is Codebook.MCG:
        return _half_sums(states * np.uint32(MARKERS["mcg"][1]))
    return _half_sums(states * np.uint32(_INST3_FACTOR) + np.uint32(_INST3_OFFSET))


def _half_sums(hashed: npt.NDArray[np.uint32]) -> Half:
    """Both halves of a masked hash, read as float16, added with one rounding."""
    masked = (hashed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    low = (masked & _LOW_WORD).astype(np.uint16).view(np.float16)
    high = (masked >> np.uint32(16)).astype(np.uint16).view(np.float16)
    weights: Half = (low.astype(np.float64) + high.astype(np.float64)).astype(np.float16)
    return weights


def _byte_sums(hashed: npt.NDArray[np.uint32]) -> Half:
    """An affine function of the sum of the hash's bytes, one float16 fused multiply-add."""
    total = sum((hashed >> np.uint32(8 * byte)) & np.uint32(0xFF) for byte in range(4))
    factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
    # float64 holds product and sum exactly, so that the conversion is the only rounding.
    weights: Half = ((1024.0 + np.asarray(total, np.float64)) * factor + offset).astype(np.float16)
    return weights


def decode_states(states: npt.NDArray[Any], codebook: Codebook) -> Half:
    """Weights of 16-bit states, same shape, exact."""
    weights: Half = codebook_table(codebook)[np.asarray(states)]
    return weights


def decode(trellis: npt.NDArray[Any], half_bits: int, codebook: Codebook) -> Half:
    """Decode a trellis to W, still between its two Hadamard transforms.

    Args:
        trellis: ``[k/16, n/16, 16·K]`` 16-bit words as stored.
        half_bits: 2·K.
        codebook: the linear's codebook.

    Returns:
        float16 ``[k, n]``.

    Raises:
        ValueError: the trellis is not of that shape.
    """
    rows, columns, _ = trellis.shape
    weights = np.empty((rows, TILE, columns, TILE), np.float16)
    step = max(1, _STEP_BYTES // (columns * TILE * TILE * 8))
    for start in range(0, rows, step):
        states = unpack_states(trellis[start : start + step], half_bits, row_major=True)
        tiles = decode_states(states, codebook).reshape(-1, columns, TILE, TILE)
        weights[start : start + step] = tiles.transpose(0, 2, 1, 3)
    return weights.reshape(rows * TILE, columns * TILE)


def hadamard(size: int = BLOCK) -> Double:
    """The Sylvester Hadamard matrix in natural order, scaled to be orthonormal, float64 ``[size, size]``."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: Double = matrix / np.sqrt(size)
    return scaled


def transform_blocks(values: npt.NDArray[Any]) -> Double:
    """Hadamard-transform each run of 128 along the last axis; its own inverse, float64."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK).astype(np.float64)
    return (blocks @ hadamard()).reshape(values.shape)


def unpack_signs(packed: npt.NDArray[Any]) -> Half:
    """Signs of a legacy ``su`` or ``sv``: I16 ``[channels/16]`` to ±1 in float16 ``[channels]``; a set bit is −1."""
    bits = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), bitorder="little")
    return (1.0 - 2.0 * bits).astype(np.float16)


def dense_weight(
    trellis: npt.NDArray[Any],
    half_bits: int,
    codebook: Codebook,
    suh: npt.NDArray[Any],
    svh: npt.NDArray[Any],
) -> Double:
    """The weight that multiplies plain activations, y = x @ W: both transforms and both scales applied.

    Args:
        trellis: ``[k/16, n/16, 16·K]`` as stored.
        half_bits: 2·K.
        codebook: the linear's codebook.
        suh: ``[k]``, or packed signs ``[k/16]``.
        svh: ``[n]``, or packed signs ``[n/16]``.

    Returns:
        float64 ``[k, n]``.
    """
    inputs, outputs = (unpack_signs(scale) if scale.dtype.kind in "iu" else scale for scale in (suh, svh))
    rotated = transform_blocks(decode(trellis, half_bits, codebook).T).T
    return transform_blocks(rotated * inputs.astype(np.float64)[:, None]) * outputs.astype(np.float64)


def unpack_rings(words: npt.NDArray[Any], bits: int, width: int) -> tuple[npt.NDArray[np.uint16], Half]:
    """States and scale of row-coded rings.

    Args:
        words: ``[..., 1 + width·K/16]`` 16-bit words: the scale's float16 bits, then the code, lowest bit first.
        bits: K, an integer from 1 to 8.
        width: values of one ring.

    Returns:
        States uint16 ``[..., width]`` and scales float16 ``[...]``.
    """
    rings = np.ascontiguousarray(words).view(np.uint16)
    scale = np.ascontiguousarray(rings[..., 0]).view(np.float16)
    stream = np.unpackbits(np.ascontiguousarray(rings[..., 1:]).view(np.uint8), axis=-1, bitorder="little")
    digits = stream.reshape(*stream.shape[:-1], width, bits).astype(np.uint32)
    symbols = digits @ (np.uint32(1) << np.arange(bits, dtype=np.uint32))
    states = np.zeros_like(symbols)
    for back in range(-(-16 // bits)):
        states |= np.roll(symbols, back, axis=-1) << np.uint32(back * bits)
    return states.astype(np.uint16), scale


def decode_embedding(trellis: npt.NDArray[Any], signs: npt.NDArray[Any], bits: int, width: int) -> Half:
    """Decode rows of a row-coded token embedding.

    Args:
        trellis: ``[rows, groups·(1 + 16·K)]`` as stored.
        signs: ``[groups, 256]``.
        bits: K.
        width: hidden size; what the last group holds beyond it is cut off.

    Returns:
        float16 ``[rows, width]``.
    """
    groups = len(signs)
    states, scale = unpack_rings(trellis.reshape(len(trellis), groups, -1), bits, RING_GROUP)
    values = decode_states(states, Codebook.MUL1).astype(np.float32) * scale.astype(np.float32)[..., None]
    rotated = values @ hadamard(RING_GROUP).astype(np.float32) * signs.astype(np.float32)
    return rotated.reshape(len(trellis), -1)[:, :width].astype(np.float16)


def decode_ngram(trellis: npt.NDArray[Any], bits: int, head_bias: npt.NDArray[Any]) -> Half:
    """Decode rows of an n-gram table.

    Args:
        trellis: ``[rows, 1 + 10·K]`` as stored.
        bits: K.
        head_bias: ``[rows, 160]``, the bias of the head that each row belongs to.

    Returns:
        float16 ``[rows, 160]``.
    """
    states, scale = unpack_rings(trellis, bits, RING_NGRAM)
    values = decode_states(states, Codebook.MUL1).astype(np.float32) * scale.astype(np.float32)[..., None]
    return (values + head_bias.astype(np.float32)).astype(np.float16)
