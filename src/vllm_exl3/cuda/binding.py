"""What the launches of linears share: the pointers, strides and dtypes that only a call knows."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_exl3.cuda.geometry import ShardOffsets
from vllm_exl3.ops.shards import Shard

__all__ = ["ELEMENTS", "bind", "check_bias", "check_flat", "flat_sizes"]


class _Elements(dict[torch.dtype, int]):
    """Numbers by dtype; of another dtype they say what is served, at no cost to calls that are."""

    def __missing__(self, dtype: torch.dtype) -> int:
        raise ValueError(f"found {dtype}, expected {', '.join(map(str, self))}: the kernels read no others")


ELEMENTS = _Elements({torch.float16: 0, torch.bfloat16: 1, torch.float32: 2})
"""``Element`` of types.cuh."""


def bind(
    arguments: Any,
    offsets: Sequence[ShardOffsets],
    scratch: torch.Tensor,
    scratch_parts: Mapping[str, int],
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill in what a plan's template of launch arguments leaves open.

    Args:
        arguments: a copy of the template; its structure has the fields that are set here.
        offsets: where each shard lies in the flat tensors.
        scratch: uint8, at least as long as the plan asks for.
        scratch_parts: where the parts of scratch begin, by the field that points to them.
        x: ``[M, in]``.
        trellis: int16, all shards flat.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        out: ``[M, sum of crop sizes]``.
    """
    base = scratch.data_ptr()
    for name, offset in scratch_parts.items():
        setattr(arguments, name, base + offset)
    trellis_at, suh_at, svh_at = trellis.data_ptr(), suh.data_ptr(), svh.data_ptr()
    for shard, at in zip(arguments.shards, offsets, strict=False):
        shard.trellis = trellis_at + 2 * at.trellis
        shard.suh = suh_at + 2 * at.suh
        shard.svh = svh_at + 2 * at.svh
    arguments.x, arguments.x_stride, arguments.x_type = x.data_ptr(), x.stride(0), ELEMENTS[x.dtype]
    arguments.out, arguments.out_stride, arguments.out_type = out.data_ptr(), out.stride(0), ELEMENTS[out.dtype]
    if bias is not None:
        arguments.bias, arguments.bias_type = bias.data_ptr(), ELEMENTS[bias.dtype]


@functools.lru_cache(maxsize=4096)
def flat_sizes(shards: tuple[Shard, ...]) -> tuple[int, int, int, int]:
    """Elements of the flat trellis, ``suh`` and ``svh`` of some shards, and columns of their output."""
    return (
        sum(shard.trellis_words for shard in shards),
        sum(shard.in_features for shard in shards),
        sum(shard.out_features for shard in shards),
        sum(shard.crop_size for shard in shards),
    )


def check_flat(shards: tuple[Shard, ...], trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> None:
    """Refuse tensors that a kernel would read past the end of, or misread."""
    words, inputs, outputs, _ = flat_sizes(shards)
    for name, tensor, dtype, numel in (
        ("trellis", trellis, torch.int16, words),
        ("suh", suh, torch.float16, inputs),
        ("svh", svh, torch.float16, outputs),
    ):
        if tensor.dtype != dtype or tensor.numel() != numel or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: found {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, "
                f"expected contiguous {dtype} of {numel} elements"
            )
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name}: address {tensor.data_ptr():#x} is not a multiple of 16, which bulk copies need")


def check_bias(bias: torch.Tensor, columns: int) -> None:
    """Refuse a bias that a kernel would read past the end of, or misread."""
    if bias.dtype not in ELEMENTS or bias.numel() != columns or not bias.is_contiguous():
        raise ValueError(
            f"bias: found {bias.dtype} {tuple(bias.shape)} with strides {bias.stride()}, expected {columns} contiguous "
            "floats of 16 or 32 bits"
        )
