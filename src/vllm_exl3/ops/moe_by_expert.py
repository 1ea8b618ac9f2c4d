"""The MoE op as calls of a linear, one expert after another: for comparison with kernels that do all at once.

An expert's gate and up are neighbours in the flat tensors, so they are one linear of two shards. All arithmetic between
the linears is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from vllm_exl3.ops.activation import activate
from vllm_exl3.ops.experts import TABLE_COLUMNS, Projection, unpack_expert
from vllm_exl3.ops.moe import Flat, MoECall, local_ids, sum_choices
from vllm_exl3.ops.shards import pack_shards

__all__ = ["grouped_experts"]

Linear = Callable[..., torch.Tensor]

_ROWS_AT_ONCE = 1024
"""Rows of one expert that are in work at a time: bounds the scratch, whatever the prompt's length."""


def grouped_experts(linear: Linear, x: torch.Tensor, call: MoECall) -> torch.Tensor:
    """The op with ``linear(x, trellis, suh, svh, bias, shards)`` for the projections; the table is on the CPU."""
    hidden_size, top_k = x.shape[1], call.topk_ids.shape[1]
    rows, weights = x.float(), call.topk_weights.float().reshape(-1, 1)
    results = torch.zeros((x.shape[0] * top_k, hidden_size), dtype=torch.float32, device=x.device)

    for expert, slots in _groups(local_ids(call.topk_ids, call.expert_map), call.table.shape[0]):
        first, down = _views(call.table[expert].numpy().tobytes(), call.intermediate_size, hidden_size)
        for part in slots.split(_ROWS_AT_ONCE):
            values = rows[part.div(top_k, rounding_mode="floor")]
            if call.apply_router_weight_on_input:
                values *= weights[part]
            values = _project(linear, values, call.w13, first)
            values = activate(call.activation, values, call.alpha, call.beta, call.limit)
            values = _project(linear, values, call.w2, down)
            results[part] = values if call.apply_router_weight_on_input else values.mul_(weights[part])
    return sum_choices(results.view(x.shape[0], top_k, hidden_size)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _View:
    """What one call of the linear reads: ranges (start, size) of the four flat tensors, and its shards."""

    ranges: tuple[tuple[int, int], ...]
    shards: tuple[int, ...]


def _project(linear: Linear, values: torch.Tensor, tensors: Flat, view: _View) -> torch.Tensor:
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
    # Numbers of no expert lie at both ends. Clamped, or there would be a count of everything up to the largest.
    counts = torch.bincount(flat.clamp(-1, experts) + 1, minlength=experts + 2).tolist()
    groups = order.split(counts)
    return [(expert, groups[expert + 1]) for expert in range(experts) if counts[expert + 1]]
