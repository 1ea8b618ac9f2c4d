"""The MoE op on the CPU: slots grouped by expert, each group through the native linear.

An expert's gate and up are neighbours in the flat tensors, so they are one linear of two shards. All
arithmetic between the linears is float32; experts are added in ascending order, so a token's result
does not depend on the other tokens of its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.activation import activate
from vllm_exl3.ops.experts import TABLE_COLUMNS, Projection, unpack_expert
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

    w13 = (w13_trellis, w13_suh, w13_svh, w13_bias)
    w2 = (w2_trellis, w2_suh, w2_svh, w2_bias)
    for expert, slots in _groups(local_ids(topk_ids, expert_map), table.shape[0]):
        first, down = _views(table[expert].numpy().tobytes(), intermediate_size, hidden_size)
        for part in slots.split(_ROWS_AT_ONCE):
            token = part.div(top_k, rounding_mode="floor")
            weight = weights[part]
            values = rows[token]
            if apply_router_weight_on_input:
                values *= weight
            values = activate(activation, _project(linear, values, w13, first), alpha, beta, limit)
            values = _project(linear, values, w2, down)
            output.index_add_(0, token, values if apply_router_weight_on_input else values.mul_(weight))
    return output.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _View:
    """What one call of the linear reads: ranges (start, size) of the four flat tensors, and its shards."""

    ranges: tuple[tuple[int, int], ...]
    shards: tuple[int, ...]


_Flat = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _project(linear: Linear, values: torch.Tensor, tensors: _Flat, view: _View) -> torch.Tensor:
    trellis, suh, svh, bias = tensors
    at = view.ranges
    return linear(
        values,
        trellis.narrow(0, *at[0]),
        suh.narrow(0, *at[1]),
        svh.narrow(0, *at[2]),
        bias.narrow(0, *at[3]) if bias is not None else None,
        view.shards,
    )


@lru_cache(maxsize=1 << 15)
def _views(row: bytes, intermediate: int, hidden: int) -> tuple[_View, _View]:
    """The two calls of an expert, from its part of the table; kept, for they cost more than a small linear."""
    values = np.frombuffer(row, np.int64).reshape(-1, TABLE_COLUMNS).tolist()
    *first, down = unpack_expert(values)
    return _view(first, intermediate), _view([down], hidden)


def _view(parts: list[Projection], outputs: int) -> _View:
    start = parts[0]
    ranges = (
        (start.trellis, sum(part.trellis_words for part in parts)),
        (start.suh, sum(part.in_features for part in parts)),
        (start.svh, sum(part.out_features for part in parts)),
        (start.bias, len(parts) * outputs),
    )
    return _View(ranges, tuple(pack_shards(part.shard(outputs) for part in parts)))


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
