"""The embedding op: rows of a quantized token table, decoded as they are gathered.

``torch.ops.vllm_exl3.embedding(ids, table, scales, width, dtype)``

The table's dtype says how it is coded: int16 is EXL3's row code (rings of 256 values), int8 has one
scale a row, uint8 holds int4 in groups of 128 columns. Sources: the EXL3 format as written by exllamav3
1.6.5; docs/format-embeddings.md for the integer tables.
"""

from functools import lru_cache

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.trellis import decode_states
from vllm_exl3.pack.assemble import RING_GROUP, SCALE_GROUP
from vllm_exl3.pack.stored import TILE, Codebook

__all__ = ["embedding", "embedding_reference", "row_chunk"]

_DECODED_AT_ONCE = 1 << 20
"""Values decoded at a time, so that scratch does not grow with the prompt."""

_STATE_BITS = 16

_library = torch.library.Library("vllm_exl3", "FRAGMENT")
_library.define("embedding(Tensor ids, Tensor table, Tensor scales, int width, ScalarType dtype) -> Tensor")


def embedding(
    ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Gather and decode rows.

    Args:
        ids: integer, any shape; each from 0 to rows - 1.
        table: ``[rows, …]``: int16 ``groups·(1 + 16·K)`` words, int8 ``width``, or uint8 ``ceil(width/2)`` bytes.
        scales: float16 signs ``[ceil(width/256), 256]`` of a row code; float ``[rows, 1]`` of int8;
            float ``[rows, ceil(width/128)]`` of int4.
        width: hidden size.
        dtype: of the result.

    Returns:
        ``[*ids.shape, width]``. A row code is rounded to float16 first, as the format defines it.
    """
    # There is one implementation so far, so no choice that an environment variable could make.
    backends.count_call("embedding", "reference", "VocabParallelEmbedding")
    return embedding_reference(ids, table, scales, width, dtype)


def embedding_reference(
    ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """The op in plain PyTorch, a bounded number of values at a time."""
    flat = ids.reshape(-1)
    output = torch.empty((flat.shape[0], width), dtype=dtype, device=table.device)
    decode = _decode_integers if table.dtype in (torch.int8, torch.uint8) else _decode_rings
    step = row_chunk(width)
    for start in range(0, flat.shape[0], step):
        output[start : start + step] = decode(flat[start : start + step], table, scales, width)
    return output.view(*ids.shape, width)


def row_chunk(width: int) -> int:
    """Rows that are decoded at a time."""
    return max(1, _DECODED_AT_ONCE // width)


def _decode_integers(ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    rows, scale = table.index_select(0, ids), scales.index_select(0, ids).float()
    if table.dtype == torch.int8:
        return rows.float() * scale
    integers = torch.stack((rows & 15, rows >> 4), dim=-1).flatten(1)[:, :width].float() - 8
    return integers * scale.repeat_interleave(SCALE_GROUP, dim=1)[:, :width]


def _decode_rings(ids: torch.Tensor, table: torch.Tensor, signs: torch.Tensor, width: int) -> torch.Tensor:
    groups = signs.shape[0]
    rings = table.index_select(0, ids).view(-1, groups, table.shape[1] // groups)
    scale = rings[..., :1].contiguous().view(torch.float16).float()
    bits = (rings.shape[-1] - 1) * TILE // RING_GROUP
    values = _codebook(table.device).index_select(0, _states(rings[..., 1:], bits).flatten())
    values = values.view(*rings.shape[:2], RING_GROUP) * scale
    rotated = _hadamard(values) * signs.float()
    return rotated.flatten(1)[:, :width].half()


def _states(code: torch.Tensor, bits: int) -> torch.Tensor:
    """16-bit states of rings: int16 ``[…, 16·K]``, lowest bit first, to int32 ``[…, 256]``."""
    words = code.to(torch.int32) & 0xFFFF
    first, shift = _symbol_places(bits, code.device)
    # A symbol of up to 8 bits may reach into the next word; the last one ends with the last word.
    pairs = words | (words.roll(-1, dims=-1) << _STATE_BITS)
    symbols = (pairs[..., first] >> shift) & ((1 << bits) - 1)
    states = symbols
    for back in range(1, -(-_STATE_BITS // bits)):
        states = states | (symbols.roll(back, dims=-1) << (back * bits))
    return states & 0xFFFF


@lru_cache(maxsize=64)
def _symbol_places(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For every symbol of a ring: the word it begins in, and how far to shift that word right."""
    start = torch.arange(RING_GROUP, device=device) * bits
    return start // _STATE_BITS, (start % _STATE_BITS).to(torch.int32)


@lru_cache(maxsize=16)
def _codebook(device: torch.device) -> torch.Tensor:
    """The mul1 value of every state, float32 ``[65536]``; row codes know no other codebook."""
    return decode_states(torch.arange(1 << _STATE_BITS, device="cpu"), Codebook.MUL1).float().to(device)


def _hadamard(values: torch.Tensor) -> torch.Tensor:
    """H256/16 of the last dimension, as a butterfly: each row's bits are its own, whatever the batch."""
    shape, half = values.shape, 1
    while half < RING_GROUP:
        pairs = values.view(*shape[:-1], -1, 2, half)
        first, second = pairs.unbind(-2)
        values = torch.stack((first + second, first - second), dim=-2)
        half *= 2
    return values.view(shape) / 16


@torch.library.register_fake("vllm_exl3::embedding", lib=_library)
def _embedding_fake(
    ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    return table.new_empty((*ids.shape, width), dtype=dtype)


# Autograd and Dynamo never look inside, as with the linears.
_library.impl("embedding", embedding, "CompositeExplicitAutograd")
