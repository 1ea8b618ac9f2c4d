"""The linear and dequantize ops on CUDA: one or two launches for what one tile of tokens holds, and no host wait."""

import ctypes
import functools
from collections.abc import Iterable, Sequence

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import dispatch, prefill, prefill_int8, runtime
from vllm_exl3.cuda.binding import ELEMENTS, bind
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import MAX_SHARDS, Form, GpuLimits, LinearPlan, ShardArgs
from vllm_exl3.cuda.narrow import plan_narrow
from vllm_exl3.cuda.narrow_cut import Cut
from vllm_exl3.cuda.wide import plan_wide
from vllm_exl3.ops.shards import Shard, cached_shards
from vllm_exl3.pack.stored import BLOCK

__all__ = ["choose_form", "dequantize", "instances", "linear", "prepare"]

_DEQUANTIZE_THREADS = 256
_DEQUANTIZE_SHARED = BLOCK * (BLOCK + 1) * 4
_WINDOW_BYTES = 32 << 20
"""Scratch of one call stays near this size: more rows are served in windows."""


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: Sequence[int],
    *,
    form: Form | None = None,
    cut: Cut | None = None,
    rotated: bool | None = None,
) -> torch.Tensor:
    """y = ((x·suh) H W H)·svh + bias for every shard, side by side.

    Args:
        x: ``[M, in]`` float16, bfloat16 or float32; rows may be strided.
        trellis: int16, all shards flat.
        suh: float16, all shards flat.
        svh: float16, all shards flat.
        bias: ``[sum of crop sizes]`` or None.
        shards: as `ops.shards.pack_shards` makes it.
        form: how to multiply; chosen by the dispatch table when None.
        cut: how the narrow kernel divides the work; chosen by modelled time when None.
        rotated: whether a kernel before it rotates the input; chosen by modelled time when None. It changes no bit.

    Returns:
        ``[M, sum of crop sizes]`` in x's dtype.
    """
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    rows = x.shape[0]
    every = cached_shards(tuple(shards))
    _check(every, trellis, suh, svh)
    out = x.new_empty((rows, _sizes(every)[3]))
    if rows == 0:
        return out
    if len(every) <= MAX_SHARDS:
        _linear_group(x, trellis, suh, svh, bias, every, out, form, cut, rotated)
        return out
    column = trellis_at = suh_at = svh_at = 0
    for start in range(0, len(every), MAX_SHARDS):
        group = every[start : start + MAX_SHARDS]
        words, inputs, outputs, width = _sizes(group)
        _linear_group(
            x,
            trellis[trellis_at:],
            suh[suh_at:],
            svh[svh_at:],
            None if bias is None else bias[column : column + width],
            group,
            out[:, column : column + width],
            form,
            cut,
            rotated,
        )
        column += width
        trellis_at += words
        suh_at += inputs
        svh_at += outputs
    return out


@functools.lru_cache(maxsize=4096)
def _sizes(shards: tuple[Shard, ...]) -> tuple[int, int, int, int]:
    """Elements of the flat trellis, ``suh`` and ``svh`` of some shards, and columns of their output."""
    return (
        sum(shard.trellis_words for shard in shards),
        sum(shard.in_features for shard in shards),
        sum(shard.out_features for shard in shards),
        sum(shard.crop_size for shard in shards),
    )


def _check(shards: tuple[Shard, ...], trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> None:
    """Refuse tensors that a kernel would read past the end of, or misread."""
    words, inputs, outputs, _ = _sizes(shards)
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


@functools.lru_cache(maxsize=4096)
def _codebooks(shards: tuple[Shard, ...]) -> frozenset[int]:
    return frozenset(shard.codebook for shard in shards)


def _linear_group(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: tuple[Shard, ...],
    out: torch.Tensor,
    form: Form | None,
    cut: Cut | None,
    rotated: bool | None,
) -> None:
    device = runtime.device(x.device.index)
    if form is None and cut is None and prefill_int8.serves(shards, x.shape[0], device.limits):
        prefill_int8.prefill_int8(x, trellis, suh, svh, bias, shards, out)
        return
    if form is None and cut is None and prefill.serves(shards, x.shape[0], device.limits):
        prefill.prefill(x, trellis, suh, svh, bias, shards, out)
        return
    if form is None:
        form = choose_form(shards, x.shape[0], device.limits)
    window = _window_rows(shards, x.shape[1], form, device.limits)
    for first in range(0, x.shape[0], window):
        part = x[first : first + window]
        launch = plan(shards, part.shape[0], x.shape[1], form, device.limits, cut, rotated)
        _launch(device, launch, part, trellis, suh, svh, bias, out[first : first + window])


def choose_form(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> Form:
    """The form that serves ``rows`` tokens where no prefill kernel does."""
    wanted = rows <= dispatch.FAST_TOKENS and env.PRECISION.get() == "fast"
    fast = wanted and prefill_int8.weights_refusal(shards) is None
    return dispatch.choose_form(
        _codebooks(shards), rows, limits.architecture, one_class=dispatch.batch_invariant(), fast=fast
    )


def plan(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    form: Form,
    limits: GpuLimits,
    cut: Cut | None = None,
    rotated: bool | None = None,
) -> LinearPlan:
    """The launch that serves ``rows`` tokens of a fused linear in a form."""
    if form.wide:
        return plan_wide(shards, rows, in_width, form, limits)
    return plan_narrow(shards, rows, in_width, form, limits, cut, rotated)


@functools.lru_cache(maxsize=1024)
def _window_rows(shards: tuple[Shard, ...], in_width: int, form: Form, limits: GpuLimits) -> int:
    """Rows of one launch, a whole number of tiles."""
    tile = plan(shards, form.tile_rows, in_width, form, limits)
    return form.tile_rows * max(1, _WINDOW_BYTES // max(1, tile.scratch))


def _launch(
    device: runtime.Device,
    plan: LinearPlan,
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    # Scratch belongs to this call: torch's allocator orders its reuse on this stream, and the kernels touch it only
    # after everything ahead of them has finished. So any number of streams and captured graphs may run at once.
    stream = torch.cuda.current_stream(x.device).cuda_stream
    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=x.device)
    arguments = plan.arguments_type.from_buffer_copy(plan.arguments)
    if plan.counters:
        arguments.counters = device.counters(stream, plan.counters)
    elif "counters" in plan.scratch_parts and plan.transform is None:  # which would clear them
        scratch[plan.scratch_parts["counters"] :].zero_()
    bind(arguments, plan.offsets, scratch, plan.scratch_parts, x, trellis, suh, svh, bias, out)
    dependent = device.limits.dependent_launch
    if plan.transform is not None:
        device.kernel(plan.transform.instance).launch(
            plan.transform.grid, plan.transform.threads, plan.transform.shared, stream, [arguments], dependent
        )
    gemm = device.kernel(plan.instance)
    gemm.allow_shared(plan.shared)
    gemm.launch(plan.grid, plan.threads, plan.shared, stream, [arguments], dependent, plan.cluster)


_EVERY_FORM = (1, 4, 5, 8, 9, 16, 17, 33, 65)
"""Batch sizes that between them choose every form, with the input rotated by the kernel itself and by one before it."""


def instances(shards: tuple[int, ...], in_width: int, limits: GpuLimits) -> list[Instance]:
    """The kernels that a layer needs, for batches of any size.

    Args:
        shards: as `ops.shards.pack_shards` makes it.
        in_width: columns of the layer's input.
        limits: the GPU.
    """
    every, found = cached_shards(shards), []
    for start in range(0, len(every), MAX_SHARDS):
        group = every[start : start + MAX_SHARDS]
        for rows in _EVERY_FORM:
            form = choose_form(group, rows, limits)
            found += plan(group, min(rows, form.tile_rows), in_width, form, limits).instances
        found += prefill.instances(group, limits)
        found += prefill_int8.instances(group, limits)
    return list(dict.fromkeys(found))


def prepare(layers: Iterable[tuple[tuple[int, ...], int]], device: torch.device) -> None:
    """Compile and load every kernel that these layers need, for any batch size; called while a model loads.

    Args:
        layers: each layer's shards and input width.
        device: the CUDA device.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    ready = runtime.device(index)
    ready.prepare(instance for shards, width in layers for instance in instances(shards, width, ready.limits))


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
    _check(every, trellis, suh, svh)
    device = runtime.device(trellis.device.index)
    out = torch.empty(
        (every[0].in_features, sum(shard.crop_size for shard in every)), dtype=dtype, device=trellis.device
    )
    stream = torch.cuda.current_stream(trellis.device).cuda_stream
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
        kernel.allow_shared(_DEQUANTIZE_SHARED)
        scalars = [
            ctypes.c_uint64(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
            ctypes.c_uint32(ELEMENTS[dtype]),
            ctypes.c_uint32(rotated),
        ]
        grid = (shard.out_features // BLOCK, shard.in_features // BLOCK)
        kernel.launch(grid, _DEQUANTIZE_THREADS, _DEQUANTIZE_SHARED, stream, [arguments, *scalars], False)
        column += shard.crop_size
        trellis_at += shard.trellis_words
        suh_at += shard.in_features
        svh_at += shard.out_features
    return out
