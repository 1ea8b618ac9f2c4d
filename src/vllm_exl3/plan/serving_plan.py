"""`make_plan`: what serving a pack on given GPUs takes, whether it fits, how fast it may be, and how to start it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.pack import Pack
from vllm_exl3.plan.cache import CACHE_TYPES, Capacity, cache_capacity, request_bytes, token_bytes, unsupported
from vllm_exl3.plan.estimate import cache_read_us, decode_us, prefill_us
from vllm_exl3.plan.gpus import MEASURED, Gpu
from vllm_exl3.plan.layers import CacheLayer, Layers, cache_layers
from vllm_exl3.plan.parallel import expert_parallel, tensor_parallel
from vllm_exl3.plan.placement import Placement, place, split_layers
from vllm_exl3.plan.weights import Weights, rank_weights, stage
from vllm_exl3.plan.workspace import batch_defaults, max_length, workspace

__all__ = ["Plan", "Rank", "Wish", "make_plan"]

UTILIZATION = 0.92
"""vLLM's default ``--gpu-memory-utilization``."""
BATCHES = (1, 8, 32)
PROMPTS = (1024, 8192)
_FALLBACK_LENGTH = 4096
_MOST = 1 << 31
"""Below it are the numbers that vLLM's options take."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The request: GPUs, parallelism and limits.

    Attributes:
        gpu: the GPU model, whose rates the estimate takes.
        gpu_bytes: memory of each GPU in bytes; one entry stands for all of them.
        gpus: how many there are.
        tensor_parallel: ``--tensor-parallel-size``; None divides over all equal GPUs.
        whole_experts: ``--enable-expert-parallel``.
        host_bytes: host memory for weights; None for none.
        length: ``--max-model-len``; None for what config.json allows.
        cache_type: ``--kv-cache-dtype``.
        seqs: ``--max-num-seqs``; None for vLLM's default.
        utilization: ``--gpu-memory-utilization``.

    Raises:
        ValueError: a number is not positive, or one that vLLM's options do not take.
    """

    gpu: Gpu
    gpu_bytes: tuple[int, ...]
    gpus: int = 1
    tensor_parallel: int | None = None
    whole_experts: bool = False
    host_bytes: int | None = None
    length: int | None = None
    cache_type: str = "auto"
    seqs: int | None = None
    utilization: float = UTILIZATION

    def __post_init__(self) -> None:
        named = {"GPUs": self.gpus, "tensor-parallel ranks": self.tensor_parallel, "a context": self.length,
                 "sequences": self.seqs}  # fmt: skip
        for name, value in named.items():
            if value is not None and not 0 < value < _MOST:
                raise ValueError(f"{name}: found {str(value)[:20]}, expected 1 to {_MOST - 1}")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"a share of memory: found {self.utilization}, expected more than 0 and at most 1")

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks of each pipeline stage."""
        return self.tensor_parallel or (self.gpus if len(set(self.gpu_bytes)) == 1 else 1)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return max(self.gpus // self.ranks, 1)


@dataclass
class Rank:
    """The fullest rank of one pipeline stage.

    Attributes:
        layers: its decoder layers.
        budget: bytes that vLLM may take.
        weights: what it holds.
        placement: in which tier.
        workspace: bytes by purpose.
        cache_bytes: what is left for the KV cache.
        kinds: what its layers keep.
    """

    layers: int
    budget: int
    weights: Weights
    placement: Placement
    workspace: Mapping[str, int]
    cache_bytes: int
    kinds: Sequence[CacheLayer]


@dataclass
class Plan:
    """The answer.

    Attributes:
        wish: what was asked for.
        length: ``--max-model-len`` that was planned for.
        allowed: the context that config.json allows, or 0.
        chunk: ``--max-num-batched-tokens``.
        seqs: ``--max-num-seqs``.
        ranks: one per pipeline stage.
        capacity: by cache type, the least of any rank; None where a cache is not modelled.
        unsupported: by cache type, why the model cannot have it.
        unknown: what was not modelled.
        blocker: why the pack cannot be divided so, or None.
        needed: bytes of cache that one request of full length takes on the fullest rank.
        decode: estimated tokens/s by number of sequences, each with a short context.
        decode_full: estimated tokens/s of one sequence at full length.
        prefill: estimated tokens/s of a prompt by its length.
    """

    wish: Wish
    length: int
    allowed: int
    chunk: int
    seqs: int
    ranks: list[Rank] = field(default_factory=list)
    capacity: dict[str, Capacity | None] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    blocker: str | None = None
    needed: int = 0
    decode: dict[int, float] = field(default_factory=dict)
    decode_full: float = 0.0
    prefill: dict[int, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """True if weights have a place, and the cache holds one request of full length."""
        placed = self.blocker is None and bool(self.ranks) and not any(rank.placement.short for rank in self.ranks)
        chosen = self.capacity.get(self.wish.cache_type)
        if self.wish.cache_type in self.unsupported:
            return False
        return placed and (bool(self.unknown) or (chosen is not None and chosen.longest >= self.length))

    @property
    def offloaded(self) -> bool:
        """True if weights lie in host memory."""
        return any(rank.placement.offload_gib for rank in self.ranks)

    @property
    def measured_gpu(self) -> bool:
        """True if rates of this very GPU model were measured, not scaled from another's."""
        return self.wish.gpu.name == MEASURED


def make_plan(pack: Pack, wish: Wish) -> Plan:
    """Plan serving a pack.

    Args:
        pack: the pack, by its headers.
        wish: on which GPUs, and how.
    """
    memory = min(wish.gpu_bytes)
    chunk, seqs = batch_defaults(memory, wish.gpu.name)
    allowed = min(max_length(pack.config), _MOST - 1)
    length = wish.length or allowed or _FALLBACK_LENGTH
    kinds = cache_layers(pack.config)
    plan = Plan(wish, length, allowed, chunk, wish.seqs or seqs, unknown=kinds.unknown)
    plan.blocker = _blocker(pack, wish)
    for name in dict.fromkeys((*CACHE_TYPES, wish.cache_type)):
        if reason := unsupported(name, kinds.layers):
            plan.unsupported[name] = reason
    if plan.blocker is None:
        try:
            weights = _fullest(pack, wish)
        except Exl3PackError as refusal:
            plan.blocker = f"{refusal.where}: {refusal.found}"
            return plan
        if wish.stages > len(weights.layers):
            plan.blocker = f"{wish.stages} pipeline stages for {len(weights.layers)} decoder layers"
            return plan
        _fill(pack, plan, weights, kinds)
        _estimate(pack, plan)
    return plan


def _blocker(pack: Pack, wish: Wish) -> str | None:
    if wish.gpus % wish.ranks:
        return f"{wish.gpus} GPUs are no multiple of {wish.ranks} tensor-parallel ranks"
    degrees = expert_parallel if wish.whole_experts and pack.experts else tensor_parallel
    return degrees(pack, [wish.ranks])[0].blocker


_kept_weights = functools.lru_cache(maxsize=16)(rank_weights)
"""Advice plans many times for one pack, and packs may have 300,000 tensors."""


def _fullest(pack: Pack, wish: Wish) -> Weights:
    """The weights of the rank that holds most."""
    every = {0, wish.ranks - 1, wish.ranks // 2}
    parts = [_kept_weights(pack, wish.ranks, rank, whole_experts=wish.whole_experts) for rank in sorted(every)]
    return max(parts, key=lambda part: part.total)


def _fill(pack: Pack, plan: Plan, weights: Weights, kinds: Layers) -> None:
    """Divide layers over stages and weights over tiers, and see what is left for the cache."""
    wish = plan.wish
    spent = workspace(pack.config, chunk=plan.chunk, seqs=plan.seqs, ranks=wish.ranks, length=plan.length)
    sizes = wish.gpu_bytes if len(wish.gpu_bytes) == wish.gpus else wish.gpu_bytes[:1] * wish.gpus
    budgets = [int(wish.utilization * min(sizes[index * wish.ranks : (index + 1) * wish.ranks]))
               for index in range(wish.stages)]  # fmt: skip
    counts = split_layers(weights, [budget - sum(spent.values()) for budget in budgets])
    host = wish.host_bytes // wish.gpus if wish.host_bytes is not None else None
    first = 0
    for index, (budget, count) in enumerate(zip(budgets, counts, strict=True)):
        part = stage(weights, first, count, stages=wish.stages, index=index)
        plan.ranks.append(_rank(plan, part, kinds.layers[first : first + count], budget, spent, host))
        first += count
    plan.needed = max(_needed(plan, rank) for rank in plan.ranks)
    for name in CACHE_TYPES:
        if name not in plan.unsupported:
            plan.capacity[name] = None if plan.unknown else _least(plan, name)


def _rank(
    plan: Plan, weights: Weights, kinds: Sequence[CacheLayer], budget: int, spent: Mapping[str, int], host: int | None
) -> Rank:
    room = budget - sum(spent.values())
    rank = Rank(len(weights.layers), budget, weights, Placement(0), spent, 0, kinds)
    # As VLLM_EXL3_NGRAM_TABLE=auto decides: pinned where all weights would take more than 85 % of the budget.
    pinned = bool(weights.ngram) and weights.total > 0.85 * budget
    rank.placement = place(weights, room - _needed(plan, rank), host, ngram_in_host=pinned)
    rank.cache_bytes = max(room - rank.placement.gpu, 0)
    return rank


def _needed(plan: Plan, rank: Rank) -> int:
    if plan.unknown or plan.wish.cache_type in plan.unsupported:
        return 0
    return request_bytes(rank.kinds, plan.wish.cache_type, plan.length, ranks=plan.wish.ranks, chunk=plan.chunk)


def _least(plan: Plan, cache_type: str) -> Capacity:
    """The capacity of the rank that holds the fewest tokens; ranks without a cache hold any number."""
    found = [
        cache_capacity(rank.kinds, cache_type, rank.cache_bytes, plan.length, ranks=plan.wish.ranks, chunk=plan.chunk)
        for rank in plan.ranks
        if any(layer.kind != "none" for layer in rank.kinds)
    ]
    return min(found, key=lambda capacity: capacity.tokens, default=Capacity(0, 0.0, 0))


def _estimate(pack: Pack, plan: Plan) -> None:
    """Fill in the expected speed; stages of a pipeline work one after another."""
    wish = plan.wish

    def step(batch: int, context: int) -> float:
        total = 0.0
        for rank in plan.ranks:
            read = sum(token_bytes(layer, wish.cache_type, wish.ranks) * min(context, layer.window or context)
                       for layer in rank.kinds) * batch  # fmt: skip
            cache = cache_read_us(read, wish.cache_type, wish.gpu)
            total += decode_us(rank.weights, pack.config, wish.gpu, batch=batch, cache_us=cache, ranks=wish.ranks,
                               host=rank.placement.share)  # fmt: skip
        return total

    plan.decode = {batch: batch * 1e6 / step(batch, 0) for batch in BATCHES if batch <= plan.seqs}
    plan.decode_full = 1e6 / step(1, plan.length)
    for tokens in PROMPTS:
        if tokens > plan.length:
            continue
        us = sum(
            prefill_us(rank.weights, pack.config, wish.gpu, tokens=tokens, chunk=plan.chunk, ranks=wish.ranks,
                       host=rank.placement.share)
            for rank in plan.ranks
        )  # fmt: skip
        plan.prefill[tokens] = tokens * 1e6 / us


def with_changes(pack: Pack, plan: Plan, **changes: Any) -> Plan:
    """The plan of a changed wish."""
    return make_plan(pack, replace(plan.wish, **changes))
