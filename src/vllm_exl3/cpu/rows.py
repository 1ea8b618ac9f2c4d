"""The embedding and n-gram ops on the CPU: their arguments to one call of the C++ library."""

import torch

from vllm_exl3.cpu.backend import threads
from vllm_exl3.cpu.library import RowCall, check, library, unavailable, use_openmp
from vllm_exl3.ops import backends
from vllm_exl3.ops.ngram import NgramTable
from vllm_exl3.ops.rings import ring_bits
from vllm_exl3.pack.assemble import RING_GROUP, RING_NGRAM

__all__ = ["embedding", "ngram"]

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INT8, _INT4, _CODED, _NGRAM = range(4)
_VALUES_A_THREAD = 1 << 15
"""Waking a thread takes as long as decoding about as many values, and much longer where it has to share its core."""

_KINDS = {torch.int8: _INT8, torch.uint8: _INT4, torch.int16: _CODED}


def embedding(
    ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """``vllm_exl3.ops.embedding`` on the CPU; see there for the arguments.

    Raises:
        RuntimeError: an id lies outside the table.
        ValueError: a tensor is not laid out as the library reads it.
    """
    out = torch.empty((*ids.shape, width), dtype=dtype)
    call = _call(_KINDS[table.dtype], ids, table, scales, out)
    call.width = width
    call.groups = scales.shape[0] if table.dtype == torch.int16 else scales.shape[1]
    if table.dtype == torch.int16:
        call.bits = ring_bits(table.shape[1] // scales.shape[0], RING_GROUP)
    check(library().exl3_gather_rows(call))
    return out


def ngram(
    ids: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor, table: NgramTable, out: torch.Tensor
) -> None:
    """``vllm_exl3.ops.ngram.ngram_rows`` on the CPU; see there for the arguments.

    Raises:
        RuntimeError: an id lies outside the table.
        ValueError: a tensor is not laid out as the library reads it.
    """
    call = _call(_NGRAM, ids, rows, table.bias, out)
    places = None if index is None else index.reshape(-1).contiguous()
    if places is not None:
        call.index = places.data_ptr()
    call.offsets, call.groups, call.first_row = table.offsets.data_ptr(), table.offsets.shape[0], table.first_row
    call.width, call.bits = RING_NGRAM, ring_bits(rows.shape[1], RING_NGRAM)
    check(library().exl3_gather_rows(call))


def _call(kind: int, ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> RowCall:
    use_openmp()
    for name, tensor in (("table", table), ("scales", scales), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: found strides {tensor.stride()} of {tuple(tensor.shape)}, expected contiguous")
    flat = ids.reshape(-1).long().contiguous()
    call = RowCall()
    call.ids, call.table, call.scales, call.out = (part.data_ptr() for part in (flat, table, scales, out))
    call.keep_ids = flat  # the structure holds an address alone
    call.count, call.rows, call.kind = flat.numel(), table.shape[0], kind
    call.scale_dtype, call.dtype = _DTYPES[scales.dtype], _DTYPES[out.dtype]
    call.threads = max(1, min(threads(), out.numel() // _VALUES_A_THREAD))
    return call


backends.register_backend(backends.Backend("embedding", "cpu", "native", embedding, unavailable))
backends.register_backend(backends.Backend("ngram", "cpu", "native", ngram, unavailable))
