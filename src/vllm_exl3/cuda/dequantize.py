"""The dequantize op on CUDA, and the decoding of some of a shard's columns: one launch a shard, and no host wait."""

import ctypes
from collections.abc import Sequence

import torch

from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.binding import ELEMENTS, check_flat
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import ShardArgs
from vllm_exl3.ops.linear import split_shards
from vllm_exl3.ops.shards import Shard, cached_shards
from vllm_exl3.pack.stored import BLOCK, TILE

__all__ = ["decode_columns", "dequantize", "dequantize_instance"]

_THREADS = constants("decode/dequantize.cu")["DEQUANTIZE_THREADS"]
_SHARED = BLOCK * (BLOCK + 1) * 4


def dequantize_instance(shard: Shard) -> Instance:
    """The kernel that decodes a shard to dense weights."""
    macros = (("INSTANCE_HALF_BITS", str(shard.half_bits)), ("INSTANCE_CODEBOOK", str(shard.codebook)))
    return Instance("decode/dequantize.cu", "exl3_dequantize", macros)


def dequantize(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    shards: Sequence[int],
    rotated: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dense weights ``[in_features, sum of crop sizes]`` such that y = x·W.

    Args:
        trellis: int16, all shards flat.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        shards: as `ops.shards.pack_shards` makes it; all of one ``in_features``.
        rotated: give the decoded trellis Ŵ itself, without Hadamards and channel scales.
        dtype: float16, bfloat16 or float32.
    """
    every = cached_shards(tuple(shards))
    if len({shard.in_features for shard in every}) != 1:
        raise ValueError(f"shards of {[shard.in_features for shard in every]} inputs, expected one width")
    check_flat(every, trellis, suh, svh)
    out = torch.empty(
        (every[0].in_features, sum(shard.crop_size for shard in every)), dtype=dtype, device=trellis.device
    )
    column = 0
    for shard, *parts in split_shards(trellis, suh, svh, tuple(shards)):
        decode_columns(shard, *parts, shard.crop_start, out[:, column : column + shard.crop_size], rotated=rotated)
        column += shard.crop_size
    return out


def decode_columns(
    shard: Shard,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    begin: int,
    dense: torch.Tensor,
    *,
    rotated: bool = False,
) -> None:
    """Decode columns ``begin`` and following of one shard, as many as ``dense`` has.

    Args:
        shard: whose crop does not count here.
        trellis: int16, the shard's own words, flat.
        suh: float16, its own.
        svh: float16, its own.
        begin: first column, of all that are stored.
        dense: ``[in_features, columns]``; rows may be strided.
        rotated: as in `dequantize`.
    """
    if dense.shape[1] == 0:
        return
    first = begin // BLOCK * BLOCK
    arguments = ShardArgs(
        trellis=trellis.data_ptr() + first // TILE * shard.half_bits * 16,
        suh=suh.data_ptr(),
        svh=svh.data_ptr() + 2 * first,
        in_features=shard.in_features,
        out_features=shard.out_features,
        crop_start=begin - first,
        crop_size=dense.shape[1],
    )
    kernel = runtime.device(dense.device.index).kernel(dequantize_instance(shard))
    kernel.allow_shared(_SHARED)
    scalars = [
        ctypes.c_uint64(dense.data_ptr()),
        ctypes.c_int64(dense.stride(0)),
        ctypes.c_uint32(ELEMENTS[dense.dtype]),
        ctypes.c_uint32(rotated),
    ]
    grid = (-(-(begin - first + dense.shape[1]) // BLOCK), shard.in_features // BLOCK)
    stream = runtime.current_stream(dense.device.index)
    kernel.launch(grid, _THREADS, _SHARED, stream, [arguments, *scalars], dependent=False)
