"""The MoE op on the CPU: slots grouped by expert, each group through the native linear.

An expert's gate and up are neighbours in the flat tensors, so they are one linear of two shards. All
arithmetic between the linears is float32; experts are added in ascending order, so a token's result
does not depend on the other tokens of its batch.
"""

from collections.abc import Callable

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.activation import activate
from vllm_exl3.ops.experts import Projection, unpack_expert
from vllm_exl3.ops.moe import local_ids
from vllm_exl3.ops.shards import pack_shards

__all__ = ["grouped_experts", "moe_native"]

Linear = Callable[..., torch.Tensor]

_ROWS_AT_ONCE = 1024
"""Rows of one expert that are in work at a time: bounds the scratch, whatever the prompt's length."""


def moe_native(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    """The op (see `vllm_exl3.ops.moe.moe`) on the C++ library."""
    linear = backends.find("linear", "cpu", "native")
    assert linear is not None  # `_unavailable` has said so
    return grouped_experts(linear.function, x, *arguments)  # type: ignore[arg-type]


def grouped_experts(
    linear: Linear,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13_trellis: torch.Tensor,
    w13_suh: torch.Tensor,
    w13_svh: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_trellis: torch.Tensor,
    w2_suh: torch.Tensor,
    w2_svh: torch.Tensor,
    w2_bias: torch.Tensor | None,
    table: torch.Tensor,
    kinds: list[int],
    intermediate_size: int,
    activation: str,
    alpha: float,
    beta: float,
    limit: float,
    apply_router_weight_on_input: bool,
) -> torch.Tensor:
    """The op with ``linear(x, trellis, suh, svh, bias, shards)`` for the projections."""
    hidden_size, top_k = x.shape[1], topk_ids.shape[1]
    rows, weights = x.float(), topk_weights.float().reshape(-1, 1)
    output = torch.zeros_like(rows)

    def run(parts: list[Projection], tensors: _Flat, outputs: int, values: torch.Tensor) -> torch.Tensor:
        first = parts[0]
        return linear(
            values,
            tensors[0].narrow(0, first.trellis, sum(part.trellis_words for part in parts)),
            tensors[1].narrow(0, first.suh, sum(part.in_features for part in parts)),
            tensors[2].narrow(0, first.svh, sum(part.out_features for part in parts)),
            tensors[3].narrow(0, first.bias, len(parts) * outputs) if tensors[3] is not None else None,
            tuple(pack_shards(part.shard(outputs) for part in parts)),
        )

    w13 = (w13_trellis, w13_suh, w13_svh, w13_bias)
    w2 = (w2_trellis, w2_suh, w2_svh, w2_bias)
    for expert, slots in _groups(local_ids(topk_ids, expert_map), table.shape[0]):
        *first, down = unpack_expert(table[expert].tolist())
        for part in slots.split(_ROWS_AT_ONCE):
            token = part.div(top_k, rounding_mode="floor")
            weight = weights[part]
            values = rows[token]
            if apply_router_weight_on_input:
                values *= weight
            values = activate(activation, run(first, w13, intermediate_size, values), alpha, beta, limit)
            values = run([down], w2, hidden_size, values)
            output.index_add_(0, token, values if apply_router_weight_on_input else values * weight)
    return output.to(x.dtype)


_Flat = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _groups(ids: torch.Tensor, experts: int) -> list[tuple[int, torch.Tensor]]:
    """Slots (token · top_k + k) of every expert that occurs, ascending in both."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat.clamp(min=-1) + 1, minlength=experts + 1).tolist()
    groups = order.split(counts)
    return [(expert, groups[expert + 1]) for expert in range(experts) if counts[expert + 1]]


def _unavailable() -> str | None:
    linear = backends.find("linear", "cpu", "native")
    return "the native linear is not installed" if linear is None else linear.unavailable()


backends.register_backend(backends.Backend("moe", "cpu", "native", moe_native, _unavailable))
