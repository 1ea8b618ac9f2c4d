"""The row codec in PyTorch: rings of symbols, lowest bit first, to the values of their states.

Token embeddings have rings of 256 values, n-gram rows one of 160. Source: the EXL3 format (exllamav3 1.6.5).
"""

from functools import lru_cache

import torch

from vllm_exl3.ops.trellis import decode_states
from vllm_exl3.pack.stored import TILE, Codebook

__all__ = ["ring_bits", "ring_states", "ring_values"]

_STATE_BITS = 16


def ring_bits(words: int, width: int) -> int:
    """K of rings of ``width`` values that take ``words`` 16-bit words, the scale among them."""
    return (words - 1) * TILE // width


def ring_values(rings: torch.Tensor, width: int) -> torch.Tensor:
    """Values of rings: int16 ``[…, 1 + width·K/16]`` to float32 ``[…, width]``, exact."""
    scale = rings[..., :1].contiguous().view(torch.float16).float()
    states = ring_states(rings[..., 1:], ring_bits(rings.shape[-1], width), width)
    return _codebook(rings.device).index_select(0, states.flatten()).view(states.shape) * scale


def ring_states(code: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """16-bit states of rings: int16 ``[…, width·K/16]`` to int32 ``[…, width]``."""
    words = code.to(torch.int32) & 0xFFFF
    first, shift = _symbol_places(bits, width, code.device)
    # A symbol of up to 8 bits may reach into the next word; the last one ends with the last word.
    pairs = words | (words.roll(-1, dims=-1) << _STATE_BITS)
    symbols = (pairs[..., first] >> shift) & ((1 << bits) - 1)
    states = symbols
    for back in range(1, -(-_STATE_BITS // bits)):
        states = states | (symbols.roll(back, dims=-1) << (back * bits))
    return states & 0xFFFF


@lru_cache(maxsize=64)
def _symbol_places(bits: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For every symbol of a ring: the word it begins in, and how far to shift that word right."""
    start = torch.arange(width, device=device) * bits
    return start // _STATE_BITS, (start % _STATE_BITS).to(torch.int32)


@lru_cache(maxsize=16)
def _codebook(device: torch.device) -> torch.Tensor:
    """The mul1 value of every state, float32 ``[65536]``; row codes know no other codebook."""
    return decode_states(torch.arange(1 << _STATE_BITS, device="cpu"), Codebook.MUL1).float().to(device)
