"""A plan as plain data for ``--json``, and in one line for ``inspect``."""

from typing import Any

from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.wording import byte_size
from vllm_exl3.plan.advice import advice, shell
from vllm_exl3.plan.estimate import rates
from vllm_exl3.plan.gpus import MEASURED, find_gpu, gpu_by_memory
from vllm_exl3.plan.serving_plan import Plan, Rank, Wish, make_plan
from vllm_exl3.plan.sizes import GIB

__all__ = ["CARDS", "card_line", "estimate_note", "plan_as_data"]

CARDS = {8: "RTX 3070", 12: "RTX 3060", 16: "RTX 4060 Ti", 24: "RTX 3090", 48: "L40S", 80: "H100", 141: "H200"}
"""Sizes of memory that `inspect` plans for, and the common GPU of each size that the estimate takes."""


def plan_as_data(pack: Pack, plan: Plan, revision: str | None = None) -> dict[str, Any]:
    """Everything, as JSON takes it; bytes are bytes, speeds tokens per second."""
    return {
        "source": pack.source,
        "gpu": plan.wish.gpu.name,
        "gpus": plan.wish.gpus,
        "fits": plan.fits,
        "blocker": plan.blocker,
        "max_model_len": plan.length,
        "max_num_batched_tokens": plan.chunk,
        "max_num_seqs": plan.seqs,
        "ranks": [_rank(rank) for rank in plan.ranks],
        "cache_bytes_of_one_request": plan.needed,
        "cache": {
            name: None if found is None else {"tokens": found.tokens, "requests": round(found.requests, 2),
                                              "longest": found.longest}
            for name, found in plan.capacity.items()
        },
        "cache_unsupported": plan.unsupported,
        "not_modelled": list(plan.unknown),
        "estimate": {
            "decode": {str(batch): round(speed, 1) for batch, speed in plan.decode.items()},
            "decode_at_full_length": round(plan.decode_full, 1),
            "prefill": {str(tokens): round(speed) for tokens, speed in plan.prefill.items()},
            "measured_on_this_gpu": plan.measured_gpu,
            "note": estimate_note(plan),
            "sources": rates()["sources"],
        },
        "command": shell(pack, plan, revision) if plan.fits else None,
        "advice": list(advice(pack, plan)),
    }  # fmt: skip


def _rank(rank: Rank) -> dict[str, Any]:
    weights, tiers = rank.weights, rank.placement
    return {
        "layers": rank.layers,
        "budget": rank.budget,
        "weights": {"gpu": tiers.gpu, "host": tiers.host, "without_place": tiers.short, "host_pinned": tiers.pinned},
        "weights_by_kind": {
            "embedding": weights.embedding,
            "head": weights.head,
            "layers": sum(layer.nbytes for layer in weights.layers),
            "experts": weights.experts,
            "n-gram tables": weights.ngram,
            "other": weights.other,
        },
        "cpu_offload_gb": tiers.offload_gib,
        "workspace": dict(rank.workspace),
        "cache": rank.cache_bytes,
    }


def estimate_note(plan: Plan) -> str:
    """How far the speeds can be trusted."""
    if plan.offloaded:
        return "estimate; reading weights over the bus has not been measured"
    if plan.measured_gpu:
        return f"estimate from rates measured on this GPU model ({MEASURED})"
    return (
        f"estimate: rates measured on an {MEASURED}, scaled by published figures of this GPU, on which nothing has run"
    )


def card_line(pack: Pack, gib: int) -> str:
    """A plan for a card of this size in one line."""
    gpu = find_gpu(CARDS[gib]) if gib in CARDS else gpu_by_memory(gib)
    plan = make_plan(pack, Wish(gpu, (gib * GIB,)))
    if plan.blocker is not None:
        return plan.blocker
    rank = plan.ranks[0]
    if rank.placement.short:
        return f"weights, workspace and one request lack {byte_size(rank.placement.short)}" + _instead(pack, plan)
    if plan.unknown:
        return f"weights fit, {byte_size(rank.cache_bytes)} left for the cache ({plan.unknown[0]})"
    capacity = plan.capacity["auto"]
    assert capacity is not None
    return (
        f"fits, with {capacity.tokens:,} tokens of KV cache in 16 bits; about {plan.decode[1]:.0f} tokens/s "
        f"({gpu.name}, estimated)"
    )


def _instead(pack: Pack, plan: Plan) -> str:
    found = next((line for line in advice(pack, plan) if line.startswith("--")), None)
    return f"; {found}" if found else ""
