"""The MoE op on the CPU: one call of the C++ library for all experts and tokens (csrc/cpu/moe.cpp)."""

from typing import Any

import torch

from vllm_exl3.cpu.backend import DTYPES, threads
from vllm_exl3.cpu.context import Context
from vllm_exl3.cpu.library import FlatStruct, MoECallStruct, check, library, unavailable, use_openmp
from vllm_exl3.ops import backends
from vllm_exl3.ops.activation import ACTIVATIONS
from vllm_exl3.ops.experts import TABLE_COLUMNS
from vllm_exl3.ops.moe import Flat, MoECall, local_ids

__all__ = ["moe_native", "moe_struct", "reserve", "run_struct"]

_ACTIVATION_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}


def moe_native(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The op (see `vllm_exl3.ops.moe.moe`) on the C++ library, on the threads of torch.

    Raises:
        ValueError: a tensor's dtype, size or layout is not what the op takes.
        RuntimeError: the library refuses the call.
    """
    use_openmp()
    out = torch.empty(x.shape, dtype=x.dtype)
    struct, held = moe_struct(x, MoECall(*arguments), out)
    run_struct(struct)
    del held
    return out


def run_struct(struct: MoECallStruct) -> None:
    """Compute a call.

    Raises:
        RuntimeError: the library refuses it.
    """
    check(library().exl3_moe(struct))


def reserve(struct: MoECallStruct) -> None:
    """Make the working memory of the call's context large enough for every routing of as many tokens.

    Raises:
        RuntimeError: the library refuses the call's sizes or table, or there is not enough memory.
    """
    check(library().exl3_moe_reserve(struct))


def moe_struct(
    x: torch.Tensor, call: MoECall, out: torch.Tensor, context: Context | None = None, *, slots: bool = False
) -> tuple[MoECallStruct, list[torch.Tensor]]:
    """A call as the library takes it.

    Args:
        x: ``[M, hidden]`` float16, bfloat16 or float32.
        call: the op's other arguments.
        out: ``[M, hidden]`` in the dtype of ``x`` or float32; with ``slots`` float32 ``[M, top_k, hidden]``.
        context: what it runs on; None for the threads of torch.
        slots: store each choice's weighted result, not their sum. Those of no expert here are left as they are.

    Returns:
        The structure, and the tensors that must outlive it: arguments and copies of them that it points to.

    Raises:
        ValueError: a tensor's dtype, size or layout is not what the op takes.
    """
    if x.dim() != 2 or x.dtype not in DTYPES or call.topk_ids.dim() != 2:
        raise ValueError(f"x: found {x.dtype} {tuple(x.shape)}, expected float16, bfloat16 or float32 [M, hidden]")
    tokens, hidden = x.shape
    ids = call.topk_ids if call.expert_map is None else local_ids(call.topk_ids, call.expert_map)
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.long()
    ids, weights, table = ids.contiguous(), call.topk_weights.float().contiguous(), call.table.contiguous()
    top_k = ids.shape[1]
    if x.stride(1) != 1 and hidden > 1:
        x = x.contiguous()
    shape = (tokens, top_k, hidden) if slots else (tokens, hidden)
    _expect("topk_weights", weights, torch.float32, (tokens, top_k))
    projections = 2 + ACTIVATIONS[call.activation].gated
    if len(table):  # that of a rank without experts has no columns either
        _expect("table", table, torch.int64, (len(table), projections, TABLE_COLUMNS))
    _expect("out", out, torch.float32 if slots or out.dtype != x.dtype else x.dtype, shape)
    struct = MoECallStruct(
        x=x.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        out=out.data_ptr(),
        table=table.data_ptr(),
        context=None if context is None else context.address,
        w13=_flat("w13", call.w13),
        w2=_flat("w2", call.w2),
        tokens=tokens,
        hidden=hidden,
        intermediate=call.intermediate_size,
        top_k=top_k,
        experts=len(table),
        x_stride=x.stride(0),
        out_stride=hidden,
        alpha=call.alpha,
        beta=call.beta,
        limit=call.limit,
        dtype=DTYPES[x.dtype],
        out_dtype=DTYPES[out.dtype],
        id_bytes=ids.element_size(),
        projections=projections,
        activation=_ACTIVATION_NUMBERS[call.activation],
        weight_on_input=call.apply_router_weight_on_input,
        slots=slots,
        threads=threads(),
    )
    return struct, [x, ids, weights, table, out, *(part for part in (*call.w13, *call.w2) if part is not None)]


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that the library would misread."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: found {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, "
            f"expected contiguous {dtype} {shape} on the CPU"
        )


def _flat(name: str, tensors: Flat) -> FlatStruct:
    trellis, suh, svh, bias = tensors
    for leaf, part, dtype in (
        ("trellis", trellis, torch.int16),
        ("suh", suh, torch.float16),
        ("svh", svh, torch.float16),
    ):
        _expect(f"{name}_{leaf}", part, dtype, (part.numel(),))
    if bias is not None:
        _expect(f"{name}_bias", bias, torch.float32, (bias.numel(),))
    return FlatStruct(
        trellis.data_ptr(),
        suh.data_ptr(),
        svh.data_ptr(),
        None if bias is None else bias.data_ptr(),
        trellis.numel(),
        suh.numel(),
        svh.numel(),
        0 if bias is None else bias.numel(),
    )


backends.register_backend(backends.Backend("moe", "cpu", "native", moe_native, unavailable))
