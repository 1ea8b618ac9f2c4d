"""Decoding in plain PyTorch, on any device: what the ops' references are made of.

The executable specification is `vllm_exl3.pack.codec`, in numpy; this is the same arithmetic on
tensors, bit for bit (tested on all 65,536 states).
"""

import math
from functools import lru_cache

import torch

from vllm_exl3.pack.stored import BLOCK, TILE, Codebook

__all__ = ["decode", "decode_states", "hadamard", "mul1_sums", "unpack_states"]

_STATE_BITS = 16
_POSITIONS = TILE * TILE


def decode(trellis: torch.Tensor, half_bits: int, codebook: int) -> torch.Tensor:
    """Decode whole tiles.

    Args:
        trellis: int16 ``[in/16, out/16, 16·K]``.
        half_bits: 2·K.
        codebook: a `Codebook` value.

    Returns:
        float16 ``[in, out]``: the weight in the rotated basis, without Hadamards or scales.
    """
    return _matrix(decode_states(unpack_states(trellis, half_bits), codebook))


def mul1_sums(trellis: torch.Tensor, half_bits: int) -> torch.Tensor:
    """The integers that mul1 weights are affine in: sums of the product words' bytes, 0..1005.

    Args:
        trellis: int16 ``[in/16, out/16, 16·K]``.
        half_bits: 2·K.

    Returns:
        int64 ``[in, out]``.
    """
    return _matrix(_byte_sums(unpack_states(trellis, half_bits)))


def _matrix(values: torch.Tensor) -> torch.Tensor:
    """Values of ring positions ``[in/16, out/16, 256]`` as the matrix ``[in, out]``."""
    rows, columns, _ = values.shape
    tiles = values[..., _position_of_cell(values.device)].view(rows, columns, TILE, TILE)
    return tiles.permute(0, 2, 1, 3).reshape(rows * TILE, columns * TILE)


def _byte_sums(states: torch.Tensor) -> torch.Tensor:
    product = (states * 0x83DCD12D) & 0xFFFFFFFF
    return (product & 255) + ((product >> 8) & 255) + ((product >> 16) & 255) + (product >> 24)


def unpack_states(trellis: torch.Tensor, half_bits: int) -> torch.Tensor:
    """The 16-bit state of every ring position: int16 ``[…, 16·K]`` to int64 ``[…, 256]``."""
    words = trellis.to(torch.int64) & 0xFFFF
    # The ring is read MSB first from little-endian 32-bit words: 16-bit words in the order 1, 0, 3, 2, …
    words = words.view(*words.shape[:-1], -1, 2).flip(-1).flatten(-2)
    first, shift = _windows(half_bits, trellis.device)
    pair = (words[..., first] << _STATE_BITS) | words[..., (first + 1) % words.shape[-1]]
    return (pair >> shift) & 0xFFFF


def decode_states(states: torch.Tensor, codebook: int) -> torch.Tensor:
    """16-bit states to float16 weights, exactly as the format defines them."""
    if codebook == Codebook.MUL1:
        # One rounding: the affine value has at most 21 significant bits, exact in float64.
        return ((_byte_sums(states) + 1024).double() * 0.00676727294921875 - 10.3828125).half()
    product = states * 0xCBAC1FED if codebook == Codebook.MCG else states * 89226354 + 64248484
    folded = (product & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = (_half_from_bits(folded & 0xFFFF), _half_from_bits(folded >> 16))
    return (low.double() + high.double()).half()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Apply H128/√128 to every 128 consecutive values of the last dimension, in ``x``'s dtype."""
    blocks = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    transformed: torch.Tensor = blocks @ _hadamard_matrix(x.device, x.dtype)
    return transformed.reshape(x.shape)


def _half_from_bits(bits: torch.Tensor) -> torch.Tensor:
    signed = torch.where(bits >= 1 << 15, bits - (1 << 16), bits)
    return signed.to(torch.int16).view(torch.float16)


@lru_cache(maxsize=64)
def _windows(half_bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For every position: the 16-bit word its window begins in, and how far to shift that word pair right."""
    position = torch.arange(_POSITIONS, device=device)
    # A half-integer K alternates between ⌊K⌋ and ⌈K⌉ new bits, beginning with the smaller.
    end = ((position + 1) * half_bits) // 2
    start = (end - _STATE_BITS) % (_POSITIONS * half_bits // 2)
    return start // _STATE_BITS, _STATE_BITS - start % _STATE_BITS


@lru_cache(maxsize=16)
def _position_of_cell(device: torch.device) -> torch.Tensor:
    """Ring position of every cell of a tile, row by row."""
    row = torch.arange(TILE, device=device).view(TILE, 1)
    column = torch.arange(TILE, device=device).view(1, TILE)
    lane = 4 * (column & 7) + ((row & 7) >> 1)
    slot = (row & 1) + 2 * (row >> 3) + 4 * (column >> 3)
    return (8 * lane + slot).flatten()


@lru_cache(maxsize=16)
def _hadamard_matrix(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    index = torch.arange(BLOCK, device=device)
    parity = torch.zeros((BLOCK, BLOCK), dtype=torch.int64, device=device)
    common = index.view(-1, 1) & index.view(1, -1)
    for bit in range(7):
        parity ^= (common >> bit) & 1
    return ((1 - 2 * parity).double() / math.sqrt(BLOCK)).to(dtype)
