"""The dense weight of one EXL3 linear, decoded on any device: for layers that want a matrix and not a product."""

import torch

from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import BLOCK, TILE

__all__ = ["decoded_weight"]

_CHUNK = 8 * BLOCK
"""Output channels decoded at once, since states take eight times the bytes of the weights that they become."""


def decoded_weight(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    half_bits: int,
    codebook: int,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight ``[out, in]`` that one stored linear stands for.

    Args:
        trellis: ``[in/16, out/16, 16·K]`` int16.
        suh: ``[in]``, input scales.
        svh: ``[out]``, output scales.
        half_bits: 2·K.
        codebook: a value of `vllm_exl3.pack.stored.Codebook`.
        shape: (out, in) without padding.
        dtype: of the result; everything before is computed in float32.
    """
    outputs, inputs = shape
    weight = torch.empty(shape, dtype=dtype, device=trellis.device)
    for start in range(0, outputs, _CHUNK):
        stop = min(start + _CHUNK, svh.numel())
        tiles = trellis[:, start // TILE : stop // TILE].contiguous()
        values = hadamard(decode(tiles, half_bits, codebook).float()) * svh[start:stop].float()
        values = hadamard(values.T.contiguous()) * suh.float()
        weight[start:stop] = values[: outputs - start, :inputs].to(dtype)
    return weight
