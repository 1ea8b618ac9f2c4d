"""The CPU backend of the ops: `vllm_exl3.ops` arguments to calls of the C++ library.

Nothing but the parsed shard layouts is kept between calls, so weights may move, be freed or be
reloaded at any time.
"""

import ctypes
from functools import lru_cache

import torch

from vllm_exl3.cpu.library import LinearCall, ShardStruct, check, library, unavailable, use_openmp
from vllm_exl3.ops import backends
from vllm_exl3.ops.shards import Shard, unpack_shards
from vllm_exl3.processors import quota_threads

__all__ = ["DTYPES", "dequantize", "linear", "threads"]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Numbers of the library's dtypes."""


class _Layout:
    """A shard list as the library takes it, with the sizes that a call is checked against."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.structs = (ShardStruct * len(shards))(
            *(ShardStruct(*(getattr(shard, name) for name, _ in ShardStruct._fields_)) for shard in shards)
        )
        self.address = ctypes.addressof(self.structs)
        self.count = len(shards)
        self.in_features = min(shard.in_features for shard in shards)
        self.output = sum(shard.crop_size for shard in shards)
        self.trellis = sum(shard.trellis_words for shard in shards)
        self.suh = sum(shard.in_features for shard in shards)
        self.svh = sum(shard.out_features for shard in shards)

    def check(self, trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> None:
        """Refuse tensors that the library would read past the end of, or misread."""
        for name, tensor, dtype, numel in (
            ("trellis", trellis, torch.int16, self.trellis),
            ("suh", suh, torch.float16, self.suh),
            ("svh", svh, torch.float16, self.svh),
        ):
            if tensor.dtype != dtype or tensor.numel() != numel or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: found {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, "
                    f"expected contiguous {dtype} of {numel} elements"
                )


@lru_cache(maxsize=4096)
def _layout(shards: tuple[int, ...]) -> _Layout:
    use_openmp()
    return _Layout(unpack_shards(shards))


def threads() -> int:
    """Threads of a call: torch's, which follow the process' processors, and no more than a cgroup gives time to."""
    return min(torch.get_num_threads(), quota_threads())


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[int, ...],
) -> torch.Tensor:
    """``vllm_exl3.ops.linear`` on the CPU; see there for the arguments.

    Raises:
        ValueError: a tensor's dtype or size disagrees with the shards.
    """
    layout = _layout(shards)
    layout.check(trellis, suh, svh)
    rows, columns = x.shape
    if x.dtype not in DTYPES or columns > layout.in_features:
        raise ValueError(f"x: found {x.dtype} {tuple(x.shape)}, expected at most {layout.in_features} float columns")
    if columns > 1 and x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty((rows, layout.output), dtype=x.dtype)
    call = LinearCall()
    call.shards = layout.address
    call.trellis, call.suh, call.svh = trellis.data_ptr(), suh.data_ptr(), svh.data_ptr()
    call.x, call.y = x.data_ptr(), y.data_ptr()
    call.rows, call.columns, call.x_stride, call.y_stride = rows, columns, x.stride(0), layout.output
    call.shard_count, call.dtype, call.threads = layout.count, DTYPES[x.dtype], threads()
    if bias is not None:
        if bias.dtype not in DTYPES or bias.numel() != layout.output or not bias.is_contiguous():
            raise ValueError(f"bias: found {bias.dtype} {tuple(bias.shape)}, expected {layout.output} floats")
        call.bias, call.bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
    check(library().exl3_linear(call))
    return y


def dequantize(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    shards: tuple[int, ...],
    rotated: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weights of every shard, side by side.

    Args:
        trellis: int16, flat.
        suh: float16, flat.
        svh: float16, flat.
        shards: the layout, all of one ``in_features``.
        rotated: the decoded trellis itself, rather than the matrix that multiplies the layer's input.
        dtype: float32, float16 or bfloat16.

    Returns:
        ``[in_features, Σ crop_size]``.

    Raises:
        ValueError: a tensor's dtype or size disagrees with the shards.
    """
    layout = _layout(shards)
    layout.check(trellis, suh, svh)
    if any(shard.in_features != layout.in_features for shard in layout.shards):
        raise ValueError(f"shards: found in_features {[shard.in_features for shard in layout.shards]}, expected equal")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: found {dtype}, expected one of {', '.join(map(str, DTYPES))}")
    out = torch.empty((layout.in_features, layout.output), dtype=dtype)
    check(
        library().exl3_dequantize(
            layout.address,
            layout.count,
            trellis.data_ptr(),
            suh.data_ptr(),
            svh.data_ptr(),
            int(rotated),
            DTYPES[dtype],
            out.data_ptr(),
            layout.output,
            threads(),
        )
    )
    return out


backends.register_backend(backends.Backend("linear", "cpu", "native", linear, unavailable))
backends.register_backend(backends.Backend("dequantize", "cpu", "native", dequantize, unavailable))
