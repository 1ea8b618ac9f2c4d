"""The linear op by way of dense weights: decoded to bounded scratch, multiplied by cuBLAS.

What others do for many tokens. Here it is the oracle on a GPU and the yardstick of the prefill kernel, which decodes
inside the product; it is chosen by name only. Decoded weights are rounded to x's dtype, which costs bfloat16 about
2e-3 of relative error.
"""

from collections.abc import Sequence

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.binding import check_flat
from vllm_exl3.cuda.dequantize import decode_columns, dequantize_instance
from vllm_exl3.ops.backends import count_reconstructed
from vllm_exl3.ops.linear import split_shards
from vllm_exl3.ops.shards import Shard, cached_shards
from vllm_exl3.pack.stored import BLOCK

__all__ = ["linear", "prepare"]


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: Sequence[int],
) -> torch.Tensor:
    """y = x·W + bias for every shard, side by side, W = diag(suh)·H·Ŵ·H·diag(svh) in x's dtype.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32.
        trellis: int16, all shards flat.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        shards: as `ops.shards.pack_shards` makes it.

    Returns:
        ``[M, sum of crop sizes]`` in x's dtype.
    """
    layout = tuple(shards)
    every = cached_shards(layout)
    check_flat(every, trellis, suh, svh)
    out = x.new_empty((x.shape[0], sum(shard.crop_size for shard in every)))
    # One for all shards: of two, the first would still be there while the second is made.
    scratch = x.new_empty(max(_elements_at_once(shard, x.element_size()) for shard in every))
    column = 0
    for shard, words, suh_part, svh_part in split_shards(trellis, suh, svh, layout):
        step = _columns_at_once(shard, x.element_size())
        dense = scratch[: _elements_at_once(shard, x.element_size())].view(shard.in_features, -1)
        for first in range(shard.crop_start // BLOCK * BLOCK, shard.crop_start + shard.crop_size, step):
            begin = max(first, shard.crop_start)
            end = min(first + step, shard.crop_start + shard.crop_size)
            part = dense[:, : end - begin]
            decode_columns(shard, words, suh_part, svh_part, begin, part)
            count_reconstructed(part.nbytes)
            at = column + begin - shard.crop_start
            torch.matmul(x, part[: x.shape[1]], out=out[:, at : at + end - begin])
        column += shard.crop_size
    return out if bias is None else out.add_(bias)


def _columns_at_once(shard: Shard, element_size: int) -> int:
    columns = (env.RECONSTRUCT_MB.get() << 20) // (shard.in_features * element_size)
    return max(BLOCK, columns // BLOCK * BLOCK)


def _elements_at_once(shard: Shard, element_size: int) -> int:
    return shard.in_features * min(_columns_at_once(shard, element_size), shard.out_features)


def prepare(layers: Sequence[tuple[tuple[int, ...], int]], device: torch.device) -> None:
    """Compile and load the decoders that these layers need."""
    index = torch.cuda.current_device() if device.index is None else device.index
    runtime.device(index).prepare(dequantize_instance(shard) for layout, _ in layers for shard in cached_shards(layout))
