"""The linear op on CUDA: one or two launches for what one tile of tokens holds, and no host wait."""

import functools
from collections.abc import Iterable, Sequence

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import dispatch, fused_linear, gemm, launch, prefill, prefill_int8, runtime
from vllm_exl3.cuda.binding import check_bias, check_flat, flat_sizes
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.gemm_plan import plan_gemm
from vllm_exl3.cuda.geometry import MAX_SHARDS, Form, GpuLimits, LinearPlan
from vllm_exl3.cuda.launch import Step
from vllm_exl3.cuda.narrow import NARROW_32, plan_narrow, serves_narrow_32
from vllm_exl3.cuda.narrow_partition import NarrowPartition
from vllm_exl3.cuda.wide import plan_wide
from vllm_exl3.ops.shards import Shard, cached_shards

__all__ = ["EVERY_FORM", "choose_form", "instances", "linear", "prepare"]

_WINDOW_BYTES = 32 << 20
"""Scratch of one call stays near this size: more rows are served in windows."""

_MOST_TILES = 65535
"""Row tiles of one launch: what CUDA takes as a grid's second size."""


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    shards: Sequence[int],
    *,
    form: Form | None = None,
    partition: NarrowPartition | None = None,
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
        partition: how the narrow kernel divides the work; chosen by modelled time when None.
        rotated: whether a kernel before it rotates the input; chosen by modelled time when None. It changes no bit.

    Returns:
        ``[M, sum of crop sizes]`` in x's dtype.

    Raises:
        ValueError: a tensor's dtype, size or layout disagrees with the shards, or no kernel serves them on this GPU.
    """
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    every = cached_shards(tuple(shards))
    check_flat(every, trellis, suh, svh)
    out = x.new_empty((x.shape[0], flat_sizes(every)[3]))
    if bias is not None:
        check_bias(bias, out.shape[1])
    if out.shape[0] == 0:
        return out
    if len(every) <= MAX_SHARDS:
        _linear_group(x, trellis, suh, svh, bias, every, out, form, partition, rotated)
        return out
    column = trellis_at = suh_at = svh_at = 0
    for start in range(0, len(every), MAX_SHARDS):
        group = every[start : start + MAX_SHARDS]
        words, inputs, outputs, width = flat_sizes(group)
        _linear_group(
            x,
            trellis[trellis_at:],
            suh[suh_at:],
            svh[svh_at:],
            None if bias is None else bias[column : column + width],
            group,
            out[:, column : column + width],
            form,
            partition,
            rotated,
        )
        column += width
        trellis_at += words
        suh_at += inputs
        svh_at += outputs
    return out


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
    partition: NarrowPartition | None,
    rotated: bool | None,
) -> None:
    device = runtime.device(x.device.index)
    settings = (env.batch_invariant(), env.PRECISION.get())
    steps = _steps(shards, x.shape[0], x.shape[1], device.limits, settings, form, partition, rotated)
    launch.run(steps, device, x, trellis, suh, svh, bias, out)


@functools.lru_cache(maxsize=4096)
def _steps(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    limits: GpuLimits,
    settings: tuple[bool, str],
    form: Form | None,
    partition: NarrowPartition | None,
    rotated: bool | None,
) -> tuple[Step, ...]:
    """The launches that serve a call, each of some rows; cached, since eager mode looks them up in every call.

    Args:
        shards: as `linear` has them.
        rows: tokens.
        in_width: columns of the input.
        limits: the GPU.
        settings: what the process's environment says of arithmetic, on which the answer depends.
        form: see `linear`.
        partition: see `linear`.
        rotated: see `linear`.
    """
    if form is None and partition is None:
        if prefill_int8.serves(shards, rows, limits):
            return prefill.steps(shards, rows, in_width, limits, int8=True)
        if (int8 := gemm.choose(shards, rows, limits)) is not None:
            return (Step(None, plan_gemm(shards, rows, in_width, limits, int8=int8)),)
        if prefill.serves(shards, rows, limits):
            return prefill.steps(shards, rows, in_width, limits)
    form = form or choose_form(shards, rows, limits)
    window = _window_rows(shards, in_width, form, limits)
    if window >= rows:  # a slice of everything takes as long as a launch
        return (Step(None, plan(shards, rows, in_width, form, limits, partition, rotated)),)
    return tuple(
        Step(
            slice(first, first + window),
            plan(shards, min(window, rows - first), in_width, form, limits, partition, rotated),
        )
        for first in range(0, rows, window)
    )


def choose_form(shards: tuple[Shard, ...], rows: int, limits: GpuLimits) -> Form:
    """The form that serves ``rows`` tokens where neither the GEMM kernel nor a prefill kernel does."""
    fast = rows <= dispatch.FAST_TOKENS and prefill_int8.fast(shards)
    one_class = env.batch_invariant()
    form = dispatch.choose_form(_codebooks(shards), rows, limits.architecture, one_class=one_class, fast=fast)
    many = form.wide and rows <= NARROW_32.tile_rows and not one_class
    return NARROW_32 if many and serves_narrow_32(shards, rows, limits) else form


def plan(
    shards: tuple[Shard, ...],
    rows: int,
    in_width: int,
    form: Form,
    limits: GpuLimits,
    partition: NarrowPartition | None = None,
    rotated: bool | None = None,
) -> LinearPlan:
    """The launch that serves ``rows`` tokens of a fused linear in a form."""
    if form.wide:
        return plan_wide(shards, rows, in_width, form, limits)
    return plan_narrow(shards, rows, in_width, form, limits, partition, rotated)


def _window_rows(shards: tuple[Shard, ...], in_width: int, form: Form, limits: GpuLimits) -> int:
    """Rows of one launch, a whole number of tiles."""
    tile = plan(shards, form.tile_rows, in_width, form, limits)
    return form.tile_rows * min(_MOST_TILES, max(1, _WINDOW_BYTES // max(1, tile.scratch)))


EVERY_FORM = (1, 4, 5, 8, 9, 16, 17, 32, 33, 65)
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
        for rows in EVERY_FORM:
            form = choose_form(group, rows, limits)
            found += plan(group, min(rows, form.tile_rows), in_width, form, limits).instances
        found += gemm.instances(group, limits)
        found += fused_linear.instances(group, limits)
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
