"""Linears of 9 to 128 tokens whose rotation computes the RMS norm or activation before it: a kernel less each."""

import functools

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import gemm, prefill_int8, runtime
from vllm_exl3.cuda.binding import check_bias, check_flat, flat_sizes
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.gemm_plan import GEMM_TILES, plan_gemm, refusal
from vllm_exl3.cuda.geometry import MAX_SHARDS, GpuLimits
from vllm_exl3.cuda.launch import launch_kernels
from vllm_exl3.cuda.prefill_input import MOST_FEW_IN, Input
from vllm_exl3.ops.backends import FusedLinear
from vllm_exl3.ops.fused_linear import FUSED_ROWS, Layer
from vllm_exl3.ops.shards import Shard, cached_shards

__all__ = ["FUSED", "instances", "rms_norm", "serves", "silu_and_mul"]

_VECTOR = 4
"""Elements that the kernel loads at once."""


def serves(shards: tuple[int, ...], in_width: int, dtype: torch.dtype) -> bool:
    """True where `linear` serves every number of tokens in `FUSED_ROWS` on the current device, and saves time.

    Args:
        shards: as `ops.shards.pack_shards` makes it.
        in_width: columns of the norm's or the activation's output.
        dtype: of the norm's or activation's input.
    """
    limits = runtime.device(torch.cuda.current_device()).limits
    in_vectors = dtype in (torch.float16, torch.bfloat16) and in_width % _VECTOR == 0
    return in_vectors and _serves(cached_shards(shards), limits)


@functools.lru_cache(maxsize=4096)
def _serves(shards: tuple[Shard, ...], limits: GpuLimits) -> bool:
    """The GEMM kernel is the one for most tokens; for fewer than it otherwise serves, a kernel less makes up for it."""
    if env.batch_invariant() or len(shards) > MAX_SHARDS or shards[0].in_features > MOST_FEW_IN:
        return False
    return FUSED_ROWS[-1] in gemm.served_rows(shards, limits, int8=_int8(shards, limits))


def _int8(shards: tuple[Shard, ...], limits: GpuLimits) -> bool:
    return prefill_int8.fast(shards) and refusal(shards, limits, int8=True) is None


def instances(shards: tuple[Shard, ...], limits: GpuLimits) -> list[Instance]:
    """The kernels that `linear` uses for a fused linear which it serves."""
    if not _serves(shards, limits):
        return []
    found: dict[Instance, None] = {}
    for rows in sorted({*GEMM_TILES, FUSED_ROWS[0]} & {*FUSED_ROWS}):
        for source in (Input.RMS_NORM, Input.SILU_AND_MUL):
            int8 = _int8(shards, limits)
            plan = plan_gemm(shards, rows, shards[0].in_features, limits, int8=int8, source=source)
            found |= dict.fromkeys((plan.transform.instance, plan.instance))
    return list(found)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, epsilon: float, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A linear of the RMS norm of ``x + residual``, which is not rounded in between.

    Args:
        x: ``[M, width]`` float16 or bfloat16; rows may be strided.
        residual: ``[M, width]`` in x's dtype, or None.
        norm_weight: ``[width]`` in x's dtype.
        epsilon: added to the mean of squares.
        layer: one that `serves` says is served.

    Returns:
        ``[M, sum of crop sizes]`` in x's dtype, and x + residual where there is one.

    Raises:
        ValueError: a tensor's dtype or size is another one.
    """
    x, norm_weight = _in_vectors("x", x), _in_vectors("norm_weight", norm_weight, x.dtype)
    if norm_weight.shape != x.shape[1:]:
        raise ValueError(f"norm_weight: found {tuple(norm_weight.shape)}, expected {tuple(x.shape[1:])}")
    fields: dict[str, float] = {"epsilon": epsilon, "norm_weight": norm_weight.data_ptr()}
    total = None
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(f"residual: found {tuple(residual.shape)}, expected {tuple(x.shape)}")
        residual = _in_vectors("residual", residual, x.dtype).contiguous()
        total = torch.empty_like(residual)
        fields |= {"residual": residual.data_ptr(), "residual_out": total.data_ptr()}
    return _launch(Input.RMS_NORM, x, x.shape[1], layer, fields), total


def silu_and_mul(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    """A linear of ``silu(x[:, :width])·x[:, width:]``, which is not rounded in between.

    Args:
        x: ``[M, 2·width]`` float16 or bfloat16; rows may be strided.
        layer: one that `serves` says is served.

    Raises:
        ValueError: a tensor's dtype or size is another one.
    """
    return _launch(Input.SILU_AND_MUL, _in_vectors("x", x), x.shape[1] // 2, layer, {})


def _launch(source: Input, x: torch.Tensor, width: int, layer: Layer, fields: dict[str, float]) -> torch.Tensor:
    shards = cached_shards(layer.shards)
    check_flat(shards, layer.trellis, layer.suh, layer.svh)
    out = x.new_empty((x.shape[0], flat_sizes(shards)[3]))
    if layer.bias is not None:
        check_bias(layer.bias, out.shape[1])
    device = runtime.device(x.device.index)
    plan = plan_gemm(shards, x.shape[0], width, device.limits, int8=_int8(shards, device.limits), source=source)
    launch_kernels(device, plan, x, layer.trellis, layer.suh, layer.svh, layer.bias, out, fields=fields)
    return out


def _in_vectors(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor, or a copy of it whose rows are loaded in vectors.

    Raises:
        ValueError: it is of another dtype, or of a number of columns that vectors do not divide.
    """
    if tensor.dtype not in ((torch.float16, torch.bfloat16) if dtype is None else (dtype,)):
        raise ValueError(f"{name}: found {tensor.dtype}, expected {dtype or 'float16 or bfloat16'}")
    if tensor.shape[-1] % _VECTOR:
        raise ValueError(f"{name}: found {tensor.shape[-1]} columns, expected a multiple of {_VECTOR}")
    aligned = tensor.stride(-1) == 1 and tensor.data_ptr() % (2 * _VECTOR) == 0
    aligned = aligned and (tensor.dim() == 1 or tensor.stride(0) % _VECTOR == 0)
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


FUSED = FusedLinear(serves, rms_norm, silu_and_mul)
"""What the native backend of linears registers."""
