"""The embedding and n-gram ops on CUDA: one launch each, no host wait; n-gram rows may lie in host memory."""

import ctypes
from collections.abc import Iterator

import torch

from vllm_exl3.cuda import exllamav3_rows, runtime
from vllm_exl3.cuda.backend import unavailable
from vllm_exl3.cuda.binding import ELEMENTS
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants, members
from vllm_exl3.ops.backends import Backend, register_backend
from vllm_exl3.ops.ngram import NgramTable
from vllm_exl3.ops.rings import ring_bits
from vllm_exl3.pack import Pack, StoredRowTable
from vllm_exl3.pack.assemble import RING_GROUP, RING_NGRAM

__all__ = ["EmbeddingArgs", "embedding", "every_instance", "instance_for", "ngram", "ngram_instance", "pack_instances"]

_THREADS = constants("decode/embedding.cu")["EMBEDDING_THREADS"]
_WARPS = _THREADS // 32
_INT8, _INT4, _CODED, _NGRAM = range(4)
"""``Kind`` of kernels/embedding.cu."""

_VECTOR = 8
"""Columns that a thread of the integer kernels handles where rows are aligned for it."""


class EmbeddingArgs(ctypes.Structure):
    """``EmbeddingArgs`` of decode/embedding.cu."""

    _fields_ = members("decode/embedding.cu", "EmbeddingArgs")


def _instance(kind: int, detail: int) -> Instance:
    name = "INSTANCE_VECTOR" if kind in (_INT8, _INT4) else "INSTANCE_BITS"
    return Instance("decode/embedding.cu", "exl3_embedding", (("INSTANCE_KIND", str(kind)), (name, str(detail))))


def instance_for(table: torch.Tensor, groups: int, width: int) -> Instance:
    """The kernel that serves a token embedding.

    Args:
        table: as the op takes it.
        groups: rings of a row; of an integer table it does not matter.
        width: hidden size.
    """
    if table.dtype == torch.int16:
        return _instance(_CODED, ring_bits(table.shape[1] // groups, RING_GROUP))
    return _instance(_INT8 if table.dtype == torch.int8 else _INT4, _VECTOR if width % _VECTOR == 0 else 1)


def ngram_instance(words: int) -> Instance:
    """The kernel that serves n-gram rows of ``words`` 16-bit words."""
    return _instance(_NGRAM, ring_bits(words, RING_NGRAM))


def every_instance() -> Iterator[Instance]:
    """Every kernel there is, for the compile tests and the checks on a GPU."""
    for kind in (_INT8, _INT4):
        yield from (_instance(kind, vector) for vector in (1, _VECTOR))
    for kind in (_CODED, _NGRAM):
        yield from (_instance(kind, bits) for bits in range(1, 9))


def pack_instances(pack: Pack) -> list[Instance]:
    """The kernels that a pack's embeddings and n-gram tables use, from its headers."""
    found = [_instance(_NGRAM, table.bits) for table in pack.ngram_tables.values()]
    for table in pack.embeddings.values():
        if isinstance(table, StoredRowTable):
            found.append(_instance(_CODED, table.bits))
        else:  # the header of an int4 table does not tell an odd width from the next even one
            found += [_instance(_INT8 if table.bits == 8 else _INT4, vector) for vector in (1, _VECTOR)]
    return list(dict.fromkeys(found))


def embedding(
    ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """``vllm_exl3.ops.embedding`` on CUDA; see there for the arguments. A row outside the table comes as zeros.

    Raises:
        ValueError: a tensor's layout is not what the kernel reads.
    """
    flat = _ids(ids)
    out = torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)
    integers = table.dtype in (torch.int8, torch.uint8)
    groups = scales.shape[1] if integers else scales.shape[0]
    for name, tensor in (("table", table), ("scales", scales)):
        _check(name, tensor, 16)
    if not flat.numel():
        return out
    arguments = _arguments(flat, table, scales, out, width)
    arguments.groups = groups
    if scales.dtype in ELEMENTS:
        arguments.scale_type = ELEMENTS[scales.dtype]
    instance = instance_for(table, groups, width)
    if integers:
        columns = _VECTOR if width % _VECTOR == 0 else 1
        grid = (flat.numel(), -(-width // (columns * _THREADS)))
    else:
        grid = (flat.numel(), -(-groups // _WARPS))
    _launch(instance, grid, arguments, ids.device)
    return out


def ngram(
    ids: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor, table: NgramTable, out: torch.Tensor
) -> None:
    """``vllm_exl3.ops.ngram.ngram_rows`` on CUDA; see there for the arguments. A row outside ``rows`` comes as zeros.

    Raises:
        ValueError: a tensor's layout is not what the kernel reads.
    """
    flat = _ids(ids)
    for name, tensor, alignment in (("rows", rows, 4), ("head_bias", table.bias, 2), ("out", out, 4)):
        _check(name, tensor, alignment)
    if not flat.numel():
        return
    arguments = _arguments(flat, rows, table.bias, out, RING_NGRAM)
    places = None if index is None else index.reshape(-1).contiguous()
    if places is not None:
        arguments.index = places.data_ptr()
    arguments.offsets, arguments.heads = table.offsets.data_ptr(), table.offsets.shape[0]
    arguments.first_row = table.first_row
    _launch(ngram_instance(rows.shape[1]), (-(-flat.numel() // _WARPS), 1), arguments, ids.device)


def _ids(ids: torch.Tensor) -> torch.Tensor:
    flat = ids.reshape(-1)
    return flat.contiguous() if flat.dtype in (torch.int64, torch.int32) else flat.long()


def _check(name: str, tensor: torch.Tensor, alignment: int) -> None:
    if not tensor.is_contiguous() or tensor.data_ptr() % alignment:
        raise ValueError(
            f"{name}: found {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} at "
            f"{tensor.data_ptr():#x}, expected it contiguous at a multiple of {alignment}"
        )


def _arguments(
    ids: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, width: int
) -> EmbeddingArgs:
    return EmbeddingArgs(
        ids=ids.data_ptr(),
        table=table.data_ptr(),
        scales=scales.data_ptr(),
        out=out.data_ptr(),
        count=ids.numel(),
        rows=table.shape[0],
        width=width,
        narrow_ids=ids.dtype == torch.int32,
        out_type=ELEMENTS[out.dtype],
    )


def _launch(instance: Instance, grid: tuple[int, int], arguments: EmbeddingArgs, device: torch.device) -> None:
    kernel = runtime.device(torch.cuda.current_device() if device.index is None else device.index).kernel(instance)
    kernel.launch(grid, _THREADS, 0, torch.cuda.current_stream(device).cuda_stream, [arguments], False)


register_backend(Backend("embedding", "cuda", "native", embedding, unavailable))
register_backend(Backend("ngram", "cuda", "native", ngram, unavailable))
register_backend(Backend("ngram", "cuda", "exllamav3", exllamav3_rows.ngram, exllamav3_rows.unavailable))
