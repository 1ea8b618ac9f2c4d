"""The MoE op on CUDA: five to eight launches of fixed shapes, whatever the routing is; no host wait.

1. input transform of every slot's rows for gate and up, while one block sorts the slots by expert (for many tokens
   they are sorted first, and rows of one expert are stored together);
2. grouped GEMM over gate and up;
3. activation and down's input transform;
4. grouped GEMM over down;
5. weighted sum of every token's slots, in float32, in the order of its choices.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_exl3 import env
from vllm_exl3.cuda import moe_dispatch, runtime
from vllm_exl3.cuda.binding import ELEMENTS
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.moe_gemm import exact, gemm_instance
from vllm_exl3.cuda.moe_geometry import ACTIVATION_KINDS, Layer, MoeArgs, MoeForm
from vllm_exl3.cuda.moe_plan import (
    COMBINE,
    COMBINE_ROWS,
    COUNT,
    GROUP_ROWS,
    ROUTE,
    ROWS,
    SCHEDULE,
    SWIGLU_ROWS,
    MoePlan,
    plan_moe,
)
from vllm_exl3.ops.moe import MoECall

__all__ = ["instances", "moe", "prepare"]

_LEAVES = {"trellis": torch.int16, "suh": torch.float16, "svh": torch.float16, "bias": torch.float32}


def moe(
    x: torch.Tensor, *arguments: Any, form: MoeForm | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The op; arguments as `vllm_exl3.ops.moe.moe` without the layer class.

    Args:
        x: ``[M, hidden]``.
        arguments: those of `MoECall`.
        form: how to multiply; chosen by the number of tokens when None.
        out_dtype: of the result; that of ``x`` when None.

    Raises:
        ValueError: a dtype that no kernel reads, or tensors that they would misread.
    """
    call = MoECall(*arguments)
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    if call.table.shape[0] == 0:  # a rank without experts adds nothing to the sum
        return out.zero_()
    weights, ids = call.topk_weights.to(torch.float32).contiguous(), call.topk_ids
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"routing of {x.shape[0]} tokens: found weights {tuple(weights.shape)} and experts {tuple(ids.shape)}, "
            f"expected both as [{x.shape[0]}, choices]"
        )
    ids = (ids if ids.dtype in (torch.int32, torch.int64) else ids.int()).contiguous()
    local = None if call.expert_map is None else call.expert_map.to(torch.int32).contiguous()
    experts = call.table.shape[0]
    layer = Layer(
        kinds=_triples(call.kinds),
        experts=experts,
        total_experts=experts if local is None else local.numel(),
        top_k=ids.shape[1],
        hidden=x.shape[1],
        intermediate=call.intermediate_size,
        swiglu=call.activation == "swiglu" and call.w13_bias is None,
    )
    device, filled = runtime.device(x.device.index), _arguments(call, x, out, ids, local)
    choice = moe_dispatch.choose(layer, x.shape[0], device.limits, one_class=env.batch_invariant())
    if form is not None:
        choice = moe_dispatch.Choice(form, choice.window, form.tile_rows // 2)
    window = choice.window
    for start in range(0, x.shape[0], window):
        part = slice(start, start + window)
        filled.x, filled.out = x[part].data_ptr(), out[part].data_ptr()
        filled.weights, filled.ids = weights[part].data_ptr(), ids[part].data_ptr()
        plan = plan_moe(layer, min(window, x.shape[0] - start), choice.form, choice.fat_rows, device.limits)
        _launch(device, plan, filled, x.device)
    return out


def _arguments(
    call: MoECall, x: torch.Tensor, out: torch.Tensor, ids: torch.Tensor, local: torch.Tensor | None
) -> MoeArgs:
    """Arguments that all windows of a call have in common; ``local`` is the experts' map as the kernels read it."""
    filled = MoeArgs(
        table=call.table.data_ptr(),
        expert_map=0 if local is None else local.data_ptr(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        x_type=ELEMENTS[x.dtype],
        out_type=ELEMENTS[out.dtype],
        wide_ids=int(ids.dtype == torch.int64),
        weight_on_input=int(call.apply_router_weight_on_input),
        activation=ACTIVATION_KINDS.index(call.activation),
        alpha=call.alpha,
        beta=call.beta,
        limit=call.limit,
    )
    for stage, flat in zip(filled.stages, (call.w13, call.w2), strict=True):
        for (name, dtype), tensor in zip(_LEAVES.items(), flat, strict=True):
            setattr(stage, name, 0 if tensor is None else checked_address(name, tensor, dtype))
    return filled


def checked_address(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """A weight tensor's address, for kernels that copy sixteen bytes at a time and trust its layout.

    Raises:
        ValueError: they would misread it.
    """
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise ValueError(
            f"{name} of the experts: found {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} at "
            f"{tensor.data_ptr():#x}, expected contiguous {dtype} at a multiple of 16 bytes"
        )
    return tensor.data_ptr()


def _launch(device: runtime.Device, plan: MoePlan, arguments: MoeArgs, where: torch.device) -> None:
    # Scratch belongs to this call: torch's allocator orders its reuse on this stream, and the kernels touch it only
    # after everything ahead of them has finished. So any number of streams and captured graphs may run at once.
    scratch = torch.empty(plan.scratch.size, dtype=torch.uint8, device=where)
    for target, values in zip((arguments, *arguments.stages), (plan.values, *plan.stages), strict=True):
        for name, value in values.items():
            setattr(target, name, value)
    plan.scratch.place(arguments, scratch.data_ptr())
    stream, dependent = runtime.current_stream(where.index), device.limits.dependent_launch
    for launch in plan.launches:
        arguments.stage = launch.stage
        kernel = device.kernel(launch.instance)
        kernel.allow_shared(launch.shared)
        kernel.launch(launch.grid, launch.threads, launch.shared, stream, [arguments], dependent, launch.cluster)


def prepare(layers: Iterable[tuple[tuple[int, ...], int, int, int, int]], device: torch.device) -> None:
    """Compile and load every kernel that these layers need, for any batch size; called while a model loads.

    Args:
        layers: each layer's kinds (as the op takes them), experts on this rank and in the model, hidden and
            intermediate channels.
        device: the CUDA device.

    Raises:
        ValueError: the GPU's blocks have too little shared memory for a layer.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    ready = runtime.device(index)
    wanted = []
    for kinds, experts, total, hidden, intermediate in layers:
        layer = Layer(_triples(kinds), experts, total, 1, hidden, intermediate)
        check_shared(layer, ready.limits)
        wanted += instances(layer, ready.limits)
    ready.prepare(wanted)


def check_shared(layer: Layer, limits: GpuLimits) -> None:
    """Refuse a layer whose rows do not fit a block's shared memory, rather than fail in a request.

    Raises:
        ValueError: naming the widths and the bytes.
    """
    for form in moe_dispatch.every_form(layer, limits):
        needed = max(launch.shared for launch in plan_moe(layer, 1, form, 0, limits).launches)
        if needed > limits.shared_memory:
            raise ValueError(
                f"routed experts of {layer.hidden} and {layer.intermediate} channels, {layer.experts} of them: found "
                f"{limits.shared_memory} bytes of shared memory in a block of this GPU ({limits.architecture}), "
                f"expected {needed}. Use tensor parallelism, which divides the second width, or "
                "VLLM_EXL3_MOE_KERNEL=reference with --enforce-eager."
            )


def _triples(kinds: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    return tuple(zip(kinds[::3], kinds[1::3], kinds[2::3], strict=True))


def instances(layer: Layer, limits: GpuLimits) -> list[Instance]:
    """The kernels that a layer needs, for batches of any size."""
    forms = moe_dispatch.every_form(layer, limits)
    gemms = [gemm_instance(layer.codes, form) for form in forms]
    gemms += [gemm_instance(layer.codes, form, alone=True) for form in forms if exact(layer.codes, form)]
    grouped = [COUNT, ROUTE, SCHEDULE, *GROUP_ROWS, SWIGLU_ROWS, COMBINE_ROWS] if limits.warpgroups else []
    return [ROWS, COMBINE, *grouped, *gemms]
