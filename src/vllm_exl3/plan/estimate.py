"""Expected speed: measured rates of one GPU (``rates.json``), scaled to another by its published figures.

A linear takes the time of its start and the larger of two bounds per weight: bytes over memory bandwidth, and the
instructions that decode it. Only the H200 has been measured; every other figure is an extrapolation, and says so.
"""

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from vllm_exl3.plan.gpus import MEASURED, Gpu, find_gpu
from vllm_exl3.plan.shapes import expert_top_k
from vllm_exl3.plan.weights import LayerWeights, Weights

__all__ = [
    "HostShare",
    "cache_read_us",
    "cpu_decode_us",
    "decode_us",
    "prefill_us",
    "rates",
    "reached_experts",
]

BUS_SHARE = 0.8
"""Share of a bus' theoretical rate that reading weights reaches: assumed, not measured."""
PREFILL_REREAD = 256
"""Tokens of a prompt that one reading of a weight serves; a longer chunk reads weights in host memory again."""
_LINEARS = 4
"""Fused linears of a dense layer: qkv, o, gate and up, down."""


@dataclass(frozen=True, slots=True)
class HostShare:
    """Shares of the decoder layers' bytes that the GPU reads over the bus.

    Attributes:
        dense: of everything but routed experts.
        experts: of routed experts.
    """

    dense: float = 0.0
    experts: float = 0.0


@functools.cache
def rates() -> Mapping[str, Any]:
    """The measured rates, with the files that they come from."""
    text = resources.files("vllm_exl3.plan").joinpath("rates.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def reached_experts(experts: int, top_k: int, tokens: int) -> float:
    """How many experts of a layer so many tokens reach, if routing were even."""
    return experts * (1 - (1 - min(top_k / experts, 1.0)) ** tokens) if experts else 0.0


def decode_us(
    weights: Weights, config: Mapping[str, Any], gpu: Gpu, *, batch: int, cache_us: float = 0.0, ranks: int = 1,
    host: HostShare | None = None,
) -> float:  # fmt: skip
    """Microseconds of one decoding step on one rank.

    Args:
        weights: what the rank holds.
        config: config.json.
        gpu: the GPU.
        batch: sequences that decode together.
        cache_us: reading the KV cache, from `cache_read_us`.
        ranks: tensor-parallel ranks.
        host: what lies in host memory.
    """
    host = host or HostShare()
    step, linear = rates()["step"], rates()["linear"]
    start = linear["4"]["start_us"]
    top_k, total, active = expert_top_k(config), 0.0, weights.head_weights / 1e9
    for layer in weights.layers:
        bits = layer.weight_bits / layer.weights if layer.weights else 4.0
        reached = _reached(layer, top_k, batch, ranks)
        resident = layer.weights * (1 - host.dense)
        total += step["us_per_layer"] + _LINEARS * start + resident / 1e6 * _weight_us(bits, gpu)
        total += layer.dense_bytes * (1 - host.dense) / _bytes_per_us(gpu)
        bus = layer.nbytes * host.dense + layer.expert_bytes * reached * host.experts
        if layer.experts:
            per_expert = 8 * layer.expert_bytes / max(layer.expert_weights, 1)
            read = layer.expert_weights * reached * (1 - host.experts)
            total += rates()["experts"]["start_us"] + read / 1e6 * _weight_us(per_expert, gpu)
        total += bus / (gpu.pcie_gbps * 1e3 * BUS_SHARE)
        active += (layer.weights + layer.expert_weights * min(top_k / max(layer.experts * ranks, 1), 1.0)) / 1e9
        total += 2 * rates()["parallel"]["all_reduce_us"] * (ranks > 1)
    total += start + weights.head_weights / 1e6 * _weight_us(weights.head_bits or 16, gpu)
    return float(total + (batch - 1) * active * _sequence_us(batch) * _slower(gpu) + cache_us)


def cache_read_us(nbytes: float, cache_type: str, gpu: Gpu) -> float:
    """Microseconds of reading so many bytes of KV cache in one step; 16 bits are taken to be read as fast as fp8."""
    measured = rates()["cache_gbps"].get(cache_type, rates()["cache_gbps"]["fp8"])
    return float(nbytes / (measured * 1e3 * gpu.bandwidth_gbps / find_gpu(MEASURED).bandwidth_gbps))


def prefill_us(
    weights: Weights, config: Mapping[str, Any], gpu: Gpu, *, tokens: int, chunk: int, ranks: int = 1,
    host: HostShare | None = None,
) -> float:  # fmt: skip
    """Microseconds until a prompt of so many tokens is read; attention over long contexts is left out."""
    host = host or HostShare()
    top_k, measured = expert_top_k(config), rates()["prefill"]
    scale = gpu.bf16_tflops / find_gpu(MEASURED).bf16_tflops
    dense_flops = sum(2.0 * (layer.weights + layer.dense_bytes / 2) for layer in weights.layers)
    expert_flops = sum(
        2.0 * layer.expert_weights * min(top_k / max(layer.experts * ranks, 1), 1.0) for layer in weights.layers
    )
    done, total = 0, 0.0
    least = decode_us(weights, config, gpu, batch=1, ranks=ranks)  # launches alone take as long
    while done < tokens:
        size = min(chunk, tokens - done)
        rate = _by_length(measured["dense_tflops"], size) * scale * 1e6
        busy = size * dense_flops / rate
        if expert_flops:
            short = min(1.0, rate / (measured["dense_tflops"]["8192"] * scale * 1e6))
            busy += size * expert_flops / (measured["expert_tflops"] * scale * short * 1e6)
        total += max(busy, least)
        reads = -(-size // PREFILL_REREAD)
        over = sum(layer.nbytes * host.dense + layer.expert_bytes * host.experts for layer in weights.layers)
        total += reads * over / (gpu.pcie_gbps * 1e3 * BUS_SHARE)
        total += 2 * rates()["parallel"]["all_reduce_us"] * len(weights.layers) * (ranks > 1)
        done += size
    return total


def cpu_decode_us(weights: Weights, config: Mapping[str, Any], threads: int) -> float:
    """Microseconds of one token on a CPU like the measured one, with so many threads."""
    measured = rates()["cpu"]
    per_weight = measured["us_per_mweight"]
    bound = measured["threads"] / max(threads, 1)
    total, top_k = 0.0, expert_top_k(config)
    for layer in weights.layers:
        bits = layer.weight_bits / layer.weights if layer.weights else 4.0
        reached = _reached(layer, top_k, 1, 1)
        total += (layer.weights + layer.expert_weights * reached) / 1e6 * _nearest(per_weight, bits)
        total += layer.dense_bytes / (measured["gbps"] * 1e3)
    total += weights.head_weights / 1e6 * _nearest(per_weight, weights.head_bits or 8)
    return float(total * bound)


def _reached(layer: LayerWeights, top_k: int, batch: int, ranks: int) -> float:
    """Share of a rank's experts that one step reads."""
    everywhere = layer.experts * max(ranks, 1)
    return reached_experts(everywhere, top_k, batch) / everywhere if layer.experts else 0.0


def _weight_us(bits: float, gpu: Gpu) -> float:
    """Microseconds per million weights: the larger of bytes over bandwidth and instructions over issue rate."""
    linear, reference = rates()["linear"], find_gpu(MEASURED)
    share = max(float(name) / 8 / rate["us_per_mweight"] for name, rate in linear.items()) / reference.bandwidth_gbps
    read = bits / 8 / (share * gpu.bandwidth_gbps)
    if bits > 8:
        return float(read)
    issue = reference.multiprocessors * reference.clock_ghz / (gpu.multiprocessors * gpu.clock_ghz)
    return float(max(read, _nearest({k: rate["us_per_mweight"] for k, rate in linear.items()}, bits) * issue))


def _bytes_per_us(gpu: Gpu) -> float:
    return gpu.bandwidth_gbps * 1e3 * BUS_SHARE


def _slower(gpu: Gpu) -> float:
    return find_gpu(MEASURED).bf16_tflops / gpu.bf16_tflops


def _sequence_us(batch: int) -> float:
    return _by_length(rates()["step"]["us_per_sequence_gweight"], batch)


def _nearest(values: Mapping[str, float], wanted: float) -> float:
    return values[min(values, key=lambda name: abs(float(name) - wanted))]


def _by_length(values: Mapping[str, float], wanted: float) -> float:
    """Interpolate between measured points; constant beyond them."""
    points = sorted((float(name), value) for name, value in values.items())
    if wanted <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if wanted <= high:
            return first + (second - first) * (wanted - low) / (high - low)
    return points[-1][1]
