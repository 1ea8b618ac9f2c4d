"""The linear op's fast mode in plain PyTorch: mul1 weights and rotated activations rounded to int8.

What `vllm_exl3.cuda.prefill_int8` is compared with, and what its cost is measured with where there is no GPU.
"""

import torch

from vllm_exl3.ops.linear import split_shards
from vllm_exl3.ops.trellis import hadamard, mul1_sums
from vllm_exl3.pack.stored import Codebook

__all__ = ["MOST_HALF_BITS", "WEIGHT_STEP", "linear_int8", "quantize_rows", "weight_bytes"]

MOST_HALF_BITS = 8
"""2·K up to which the fast mode takes weights: above, its error is no longer small beside the pack's own."""

WEIGHT_STEP = 4 * 1774 / 2**18
"""What one step of an int8 weight stands for: 4·k_inv."""

_LARGEST = 127


def weight_bytes(trellis: torch.Tensor, half_bits: int) -> torch.Tensor:
    """The int8 weights of a mul1 trellis: floor((B + 3) / 4) - 128, B the sum of the product word's bytes.

    Args:
        trellis: int16 ``[in/16, out/16, 16·K]``.
        half_bits: 2·K.

    Returns:
        int8 ``[in, out]``; a weight in the rotated basis is about `WEIGHT_STEP` times it.
    """
    return ((mul1_sums(trellis, half_bits) + 3) // 4 - 128).to(torch.int8)


def quantize_rows(rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round every row to int8 by its largest magnitude.

    Args:
        rotated: float32 ``[M, in]``.

    Returns:
        int8 ``[M, in]`` and float32 ``[M, 1]``, what a step of a row stands for.
    """
    largest = rotated.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, _LARGEST / largest, 0.0)
    return (rotated * factor).round().to(torch.int8), largest / _LARGEST


def linear_int8(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[int, ...],
) -> torch.Tensor:
    """The op with int8 products, exact sums, and everything else in float32.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32.
        trellis: int16, all shards flat, all of them mul1.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        shards: as `ops.shards.pack_shards` makes it.

    Returns:
        ``[M, sum of crop sizes]`` in x's dtype.

    Raises:
        ValueError: a shard is of another codebook.
    """
    outputs = []
    for shard, words, suh_part, svh_part in split_shards(trellis, suh, svh, shards):
        if shard.codebook != Codebook.MUL1:
            raise ValueError(f"found a shard of {Codebook(shard.codebook).label}, expected mul1 only")
        rotated = x.new_zeros((x.shape[0], shard.in_features), dtype=torch.float32)
        rotated[:, : x.shape[1]] = x
        values, step = quantize_rows(hadamard(rotated * suh_part.float()))
        weights = weight_bytes(words.view(shard.trellis_shape), shard.half_bits)
        sums = (values.double() @ weights.double()).float()  # integers below 2^53: exact
        y = hadamard(sums * (step * WEIGHT_STEP)) * svh_part.float()
        outputs.append(y[:, shard.crop_start : shard.crop_start + shard.crop_size])
    output = torch.cat(outputs, dim=1)
    return (output if bias is None else output + bias.float()).to(x.dtype)
