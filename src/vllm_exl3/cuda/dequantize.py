"""The dequantize op on CUDA: one launch a shard, and no host wait."""

import ctypes
from collections.abc import Sequence

import torch

from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.binding import ELEMENTS, check_flat
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import ShardArgs
from vllm_exl3.ops.shards import Shard, cached_shards
from vllm_exl3.pack.stored import BLOCK

__all__ = ["dequantize", "dequantize_instance"]

_THREADS = 256
_SHARED = BLOCK * (BLOCK + 1) * 4


def dequantize_instance(shard: Shard) -> Instance:
    """The kernel that decodes a shard to dense weights."""
    macros = (("INSTANCE_HALF_BITS", str(shard.half_bits)), ("INSTANCE_CODEBOOK", str(shard.codebook)))
    return Instance("dequantize.cu", "exl3_dequantize", macros)


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
    device = runtime.device(trellis.device.index)
    out = torch.empty(
        (every[0].in_features, sum(shard.crop_size for shard in every)), dtype=dtype, device=trellis.device
    )
    stream = runtime.current_stream(trellis.device.index)
    column = trellis_at = suh_at = svh_at = 0
    for shard in every:
        arguments = ShardArgs(
            trellis=trellis.data_ptr() + 2 * trellis_at,
            suh=suh.data_ptr() + 2 * suh_at,
            svh=svh.data_ptr() + 2 * svh_at,
            in_features=shard.in_features,
            out_features=shard.out_features,
            crop_start=shard.crop_start,
            crop_size=shard.crop_size,
            out_column=column,
        )
        kernel = device.kernel(dequantize_instance(shard))
        kernel.allow_shared(_SHARED)
        scalars = [
            ctypes.c_uint64(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
            ctypes.c_uint32(ELEMENTS[dtype]),
            ctypes.c_uint32(rotated),
        ]
        grid = (shard.out_features // BLOCK, shard.in_features // BLOCK)
        kernel.launch(grid, _THREADS, _SHARED, stream, [arguments, *scalars], False)
        column += shard.crop_size
        trellis_at += shard.trellis_words
        suh_at += shard.in_features
        svh_at += shard.out_features
    return out
