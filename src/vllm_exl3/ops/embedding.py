"""The embedding op: rows of a quantized token table, decoded as they are gathered.

``torch.ops.vllm_exl3.embedding(ids, table, scales, width, dtype)``

The table's dtype says how it is coded: int16 is EXL3's row code (rings of 256 values), int8 has one
scale a row, uint8 holds int4 in groups of 128 columns. Sources: the EXL3 format as written by exllamav3
1.6.5; docs/format-embeddings.md for the integer tables.
"""

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.rings import ring_values
from vllm_exl3.pack.assemble import RING_GROUP, SCALE_GROUP

__all__ = ["embedding", "embedding_reference", "row_chunk"]

_DECODED_AT_ONCE = 1 << 20
"""Values decoded at a time, so that scratch does not grow with the prompt."""

_library = torch.library.Library("vllm_exl3", "FRAGMENT")
_library.define("embedding(Tensor ids, Tensor table, Tensor scales, int width, ScalarType dtype) -> Tensor")


def embedding(
    ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Gather and decode rows, with the fastest backend for the device.

    Args:
        ids: integer, any shape; each from 0 to rows - 1.
        table: ``[rows, …]``: int16 ``groups·(1 + 16·K)`` words, int8 ``width``, or uint8 ``ceil(width/2)`` bytes.
        scales: float16 signs ``[ceil(width/256), 256]`` of a row code; float ``[rows, 1]`` of int8;
            float ``[rows, ceil(width/128)]`` of int4.
        width: hidden size.
        dtype: of the result.

    Returns:
        ``[*ids.shape, width]``. A row code is rounded to float16 first, as the format defines it.

    Raises:
        ValueError: the table or the scales are not of this width: kernels would read beyond them.
    """
    _check_shapes(table, scales, width)
    backend = backends.select("embedding", table.device.type, embedding_reference).backend
    backends.count_call("embedding", backend.name, "VocabParallelEmbedding")
    rows: torch.Tensor = backend.function(ids, table, scales, width, dtype)
    return rows


def _check_shapes(table: torch.Tensor, scales: torch.Tensor, width: int) -> None:
    if table.dtype == torch.int16:
        fits = tuple(scales.shape) == (-(-width // RING_GROUP), RING_GROUP) and table.shape[1] % scales.shape[0] == 0
    else:
        columns, groups = (width, 1) if table.dtype == torch.int8 else (-(-width // 2), -(-width // SCALE_GROUP))
        fits = table.shape[1] == columns and tuple(scales.shape) == (table.shape[0], groups)
    if width < 1 or not fits:
        raise ValueError(
            f"width {width}: found a table {table.dtype} {list(table.shape)} with scales {list(scales.shape)}, "
            "expected rows and scales of that width"
        )


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
    rotated = _hadamard(ring_values(rings, RING_GROUP)) * signs.float()
    return rotated.flatten(1)[:, :width].half()


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
