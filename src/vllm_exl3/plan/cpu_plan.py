"""Serving a pack on a CPU, and what experts computed on a CPU beside a GPU would take."""

import shlex
from dataclasses import dataclass

from vllm_exl3.pack.pack import Pack
from vllm_exl3.plan.cache import Capacity, cache_capacity, request_bytes
from vllm_exl3.plan.estimate import cpu_decode_us, rates, reached_experts
from vllm_exl3.plan.layers import cache_layers
from vllm_exl3.plan.shapes import expert_top_k
from vllm_exl3.plan.sizes import GIB
from vllm_exl3.plan.weights import rank_weights
from vllm_exl3.plan.workspace import max_length

__all__ = ["CpuPlan", "cpu_experts_us", "make_cpu_plan"]

PROCESS = 2 * GIB
"""Interpreter, torch and vLLM's buffers. An allowance."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A pack on a CPU.

    Attributes:
        weights: bytes of weights, which are held once.
        cache_gib: ``VLLM_CPU_KVCACHE_SPACE``.
        length: ``--max-model-len``.
        capacity: what the cache holds, or None where it is not modelled.
        unknown: what is not modelled.
        fits: whether memory is enough.
        tokens_per_second: estimated, of one sequence.
        threads: that the estimate is for.
    """

    weights: int
    cache_gib: int
    length: int
    capacity: Capacity | None
    unknown: tuple[str, ...]
    fits: bool
    tokens_per_second: float
    threads: int

    def command(self, source: str) -> str:
        """The command that starts it."""
        words = shlex.join(["vllm", "serve", source, "--max-model-len", str(self.length)])
        return f"VLLM_CPU_KVCACHE_SPACE={self.cache_gib} {words}"


def make_cpu_plan(pack: Pack, host_bytes: int, *, threads: int | None = None, length: int | None = None) -> CpuPlan:
    """Plan serving a pack on a CPU.

    Args:
        pack: the pack, by its headers.
        host_bytes: memory in bytes.
        threads: that compute; None for as many as were measured with.
        length: ``--max-model-len``; None for what config.json allows.

    Raises:
        ValueError: there are more threads than a machine has, or a context is longer than vLLM's option takes.
    """
    for name, value, most in (("threads", threads, 1 << 16), ("a context", length, 1 << 31)):
        if value is not None and not 0 < value < most:
            raise ValueError(f"{name}: found {str(value)[:20]}, expected 1 to {most - 1}")
    weights = rank_weights(pack)
    kinds = cache_layers(pack.config)
    length = length or min(max_length(pack.config), (1 << 31) - 1) or 4096
    threads = threads or int(rates()["cpu"]["threads"])
    one = request_bytes(kinds.layers, "auto", length)
    left = host_bytes - weights.total - PROCESS
    # Four requests of full length, if memory allows; vLLM takes whole GiB.
    cache = max(min(-(-4 * one // GIB), left // GIB), 1)
    capacity = None if kinds.unknown else cache_capacity(kinds.layers, "auto", cache * GIB, length)
    fits = left >= cache * GIB and (capacity is None or capacity.longest >= length)
    speed = 1e6 / cpu_decode_us(weights, pack.config, threads)
    return CpuPlan(weights.total, cache, length, capacity, kinds.unknown, fits, speed, threads)


def cpu_experts_us(pack: Pack, threads: int, batch: int = 1) -> float:
    """Microseconds that one decoding step's routed experts would take on a CPU like the measured one.

    Nothing executes experts on a CPU beside a GPU in this version: a figure for comparison only.
    """
    measured, top_k = rates()["cpu"], expert_top_k(pack.config)
    total = 0.0
    for layer in rank_weights(pack).layers:
        if layer.experts:
            share = reached_experts(layer.experts, top_k, batch) / layer.experts
            bits = 8 * layer.expert_bytes / layer.expert_weights
            table = measured["us_per_mweight"]
            per = table[min(table, key=lambda name: abs(float(name) - bits))]
            total += layer.expert_weights * share / 1e6 * per
    return float(total * measured["threads"] / max(threads, 1))
