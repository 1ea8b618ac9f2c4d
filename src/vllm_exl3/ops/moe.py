"""The MoE op: every token through its top-k experts, weighted and summed.

``torch.ops.vllm_exl3.moe(x, topk_weights, topk_ids, expert_map, w13_*, w2_*, table, …)``

y[t] = Σ_k weight[t, k] · down_e(activation(gate_e(x[t]), up_e(x[t]))) with e = topk_ids[t, k], each
projection an EXL3 linear as in `vllm_exl3.ops.linear`. Experts that this rank does not hold add
nothing: with expert or tensor parallelism the result is this rank's share of the sum.

The sum is one of float32 products in the order of a token's choices, k = 0 on: it does not depend on which experts they
name, and can be put together from parts that were computed in different places.
"""

from typing import Any, NamedTuple

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.activation import activate
from vllm_exl3.ops.experts import unpack_expert
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import pack_shards

__all__ = ["Flat", "MoECall", "local_ids", "moe", "moe_reference", "refuse_capture", "sum_choices"]

Flat = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Trellis, suh, svh and bias of a layer's experts, one projection after the other."""

_RESULTS_AT_ONCE = 1 << 26
"""Results of choices (float32) that the reference holds at once, whatever the prompt's length."""

_library = torch.library.Library("vllm_exl3", "FRAGMENT")
_library.define(
    "moe(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, Tensor? w13_bias, "
    "Tensor w2_trellis, Tensor w2_suh, Tensor w2_svh, Tensor? w2_bias, "
    "Tensor table, int[] kinds, int intermediate_size, str activation, float alpha, float beta, float limit, "
    "bool apply_router_weight_on_input, str layer_class) -> Tensor"
)


class MoECall(NamedTuple):
    """The op's arguments after ``x``, without the layer class: what a backend's function takes.

    Attributes:
        topk_weights: float32 ``[M, top_k]``.
        topk_ids: int32 or int64 ``[M, top_k]``: experts, by their number in the whole model; other numbers for none.
        expert_map: int ``[all experts]``: the number of each on this rank, or -1; None when all are here.
        w13_trellis: int16, flat; gate and up of each expert are neighbours, here and in the next three.
        w13_suh: float16, flat.
        w13_svh: float16, flat.
        w13_bias: float32, flat: ``intermediate_size`` values per projection; or None.
        w2_trellis: int16, flat.
        w2_suh: float16, flat.
        w2_svh: float16, flat.
        w2_bias: float32 ``[experts · hidden]``, or None.
        table: int64 ``[experts, projections, 8]`` from `pack_table`, on the device of ``x``; projections are
            gate, up and down, or up and down.
        kinds: which codes occur in the table, from `projection_kinds`: for choosing kernels without reading it.
        intermediate_size: channels between the projections on this rank, before padding.
        activation: a key of `ACTIVATIONS`.
        alpha: first number of the activation.
        beta: second number of the activation.
        limit: where the activation clips; infinity for nowhere.
        apply_router_weight_on_input: multiply ``x`` by the routing weight instead of the expert's output.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor
    w2_bias: torch.Tensor | None
    table: torch.Tensor
    kinds: list[int]
    intermediate_size: int
    activation: str
    alpha: float
    beta: float
    limit: float
    apply_router_weight_on_input: bool

    @property
    def w13(self) -> Flat:
        """Trellis, suh, svh and bias of gate and up."""
        return self.w13_trellis, self.w13_suh, self.w13_svh, self.w13_bias

    @property
    def w2(self) -> Flat:
        """The same of down."""
        return self.w2_trellis, self.w2_suh, self.w2_svh, self.w2_bias


def moe(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Run the routed experts of one layer, with the fastest backend for the device.

    Args:
        x: ``[M, hidden]`` float16, bfloat16 or float32.
        arguments: those of `MoECall`, and the layer class: what the call counter files this call under.

    Returns:
        ``[M, hidden]`` in the dtype of ``x``, summed in float32.
    """
    *call, layer_class = arguments
    backend = backends.select("moe", x.device.type, moe_reference).backend
    backends.count_call("moe", backend.name, layer_class)
    output: torch.Tensor = backend.function(x, *call)
    return output


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Expert numbers on this rank, int64 like ``topk_ids``; negative, or beyond its experts, where there is none."""
    ids = topk_ids.long()
    if expert_map is None:
        return ids
    # A negative id (a padding token) must not wrap around in the map, and one beyond it is nobody's, as in the kernels.
    last = expert_map.shape[0] - 1
    return torch.where((ids < 0) | (ids > last), -1, expert_map.long()[ids.clamp(0, last)])


def sum_choices(results: torch.Tensor) -> torch.Tensor:
    """The sum over a token's choices, in their order.

    Args:
        results: float32 ``[M, top_k, hidden]``, weighted; zero where no expert is here.

    Returns:
        float32 ``[M, hidden]``.
    """
    total = torch.zeros_like(results[:, 0])
    for choice in results.unbind(1):
        total += choice
    return total


def refuse_capture(backend: str, device: torch.device) -> None:
    """Say why a kernel that reads the routing on the host cannot be captured, before CUDA says it in other words.

    Raises:
        RuntimeError: a CUDA graph is being captured on the device.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the {backend} kernels of routed experts read the routing on the host, which no CUDA graph can hold: "
            "serve with --enforce-eager, or set VLLM_EXL3_MOE_KERNEL=native"
        )


def moe_reference(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The op in plain PyTorch, in float32: what every backend is compared with, and the last resort.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    refuse_capture("reference", x.device)
    call = MoECall(*arguments)
    step = max(1, _RESULTS_AT_ONCE // (call.topk_ids.shape[1] * x.shape[1]))
    parts = zip(x.split(step), call.topk_weights.split(step), call.topk_ids.split(step), strict=True)
    return torch.cat([_tokens_reference(rows, call._replace(topk_weights=w, topk_ids=ids)) for rows, w, ids in parts])


def _tokens_reference(x: torch.Tensor, call: MoECall) -> torch.Tensor:
    """Some tokens, of which every choice's result is held."""
    ids = local_ids(call.topk_ids, call.expert_map)
    results = torch.zeros((*ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)

    def project(rows: torch.Tensor, first: bool, index: int, outputs: int) -> torch.Tensor:
        trellis, suh, svh, bias = call.w13 if first else call.w2
        part = projections[index]
        values = linear_reference(
            rows,
            trellis[part.trellis : part.trellis + part.trellis_words],
            suh[part.suh : part.suh + part.in_features],
            svh[part.svh : part.svh + part.out_features],
            bias[part.bias : part.bias + outputs] if bias is not None and part.bias >= 0 else None,
            tuple(pack_shards([part.shard(outputs)])),
        )
        return values

    for expert, row in enumerate(call.table.tolist()):
        token, slot = torch.where(ids == expert)
        if not len(token):
            continue
        projections = unpack_expert(row)
        weight = call.topk_weights[token, slot].float().unsqueeze(1)
        rows = x[token].float()
        if call.apply_router_weight_on_input:
            rows = rows * weight
        down = len(projections) - 1
        hidden = torch.cat([project(rows, True, index, call.intermediate_size) for index in range(down)], dim=1)
        hidden = activate(call.activation, hidden, call.alpha, call.beta, call.limit)
        values = project(hidden, False, down, x.shape[1])
        results[token, slot] = values if call.apply_router_weight_on_input else values * weight
    return sum_choices(results).to(x.dtype)


@torch.library.register_fake("vllm_exl3::moe", lib=_library)
def _moe_fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


# Autograd and Dynamo never look inside: one Python implementation serves every device and picks the backend.
_library.impl("moe", moe, "CompositeExplicitAutograd")
