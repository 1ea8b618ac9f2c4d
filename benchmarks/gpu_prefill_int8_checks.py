"""The fast mode of prefill against the same arithmetic in PyTorch, and against float64.

Used by ``gpu_prefill_int8.py --check`` and by the tests in ``tests/gpu``.
"""

import math
from collections.abc import Iterable

import torch
from gpu_linear_checks import Checks, exact

from vllm_exl3.cuda import prefill_int8, runtime
from vllm_exl3.cuda.prefill_input import QUANTIZE
from vllm_exl3.cuda.prefill_plan import INT8_TILES
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.int8 import linear_int8
from vllm_exl3.ops.shards import Shard, pack_shards

MIXED = (Shard(8, 2, 2176, 1024, 0, 1024), Shard(5, 2, 2176, 256, 0, 192), Shard(6, 2, 2176, 384, 64, 250))
SINGLE = tuple((Shard(half_bits, 2, 1280, 384, 0, 384),) for half_bits in (2, 3, 4, 5, 6, 7, 8))
SAME_ARITHMETIC, ROUNDED = 5e-4, 1.3e-2
"""Bounds: a value in many is rounded to the other neighbour; what docs/kernels-prefill.md states of normal inputs."""

_AFTER_CAST = {torch.float32: SAME_ARITHMETIC, torch.float16: 1e-3, torch.bfloat16: 4e-3}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def weights_of(shards: tuple[Shard, ...], seed: int) -> Tensors:
    """Flat trellis, suh and svh of random shards."""
    parts = [random_weights(shard, seed + index) for index, shard in enumerate(shards)]
    trellis, suh, svh = (torch.cat([part[place] for part in parts]) for place in range(3))
    return trellis, suh, svh


def run(
    x: torch.Tensor,
    weights: Tensors,
    bias: torch.Tensor | None,
    shards: tuple[Shard, ...],
    tokens: int | None = None,
    ranges: int | None = None,
) -> torch.Tensor:
    """The kernels into an output that is poisoned before."""
    out = torch.full((x.shape[0], sum(shard.crop_size for shard in shards)), math.nan, dtype=x.dtype, device=x.device)
    prefill_int8.prefill_int8(x, *weights, bias, shards, out, tokens=tokens, ranges=ranges)
    return out


def prepare(layers: Iterable[tuple[Shard, ...]]) -> None:
    """Compile, in parallel, what these layers need."""
    device = runtime.device(torch.cuda.current_device())
    plans = [
        prefill_int8.plan(shards, tokens, shards[0].in_features, device.limits, tokens)
        for shards in layers
        for tokens in INT8_TILES
    ]
    device.prepare([QUANTIZE, *(plan.instance for plan in plans)])


def check_kinds(checks: Checks, seed: int) -> None:
    """Every K, tile and way to cut k, on inputs narrower than the weights.

    Sums are exact, also those of parts of tiles. So bits depend on neither the tile nor how k is cut.
    """
    prepare(SINGLE)
    for shards in SINGLE:
        weights, layout = weights_of(shards, seed), tuple(pack_shards(shards))
        x = torch.randn(300, 1208, device="cuda")
        expected, found = linear_int8(x, *weights, None, layout), []
        for tokens in INT8_TILES:
            for ranges in (0, 5, 7):
                name = f"2K={shards[0].half_bits} tile {tokens} ranges {ranges}"
                found.append(run(x, weights, None, shards, tokens, ranges))
                checks.compare(name, "same arithmetic", found[-1], expected, SAME_ARITHMETIC)
                checks.same(f"{name}, bits", found[-1], found[0])
        checks.compare(f"2K={shards[0].half_bits}", "float64", found[0], exact(x, shards[0], *weights), ROUNDED)


def check_fused(checks: Checks, seed: int) -> None:
    """A fused layer of mixed K with crops and bias: dtypes, numbers of tokens, magnitudes, strides."""
    prepare([MIXED])
    weights, layout = weights_of(MIXED, seed), tuple(pack_shards(MIXED))
    for dtype, rows, magnitude in (
        (torch.float32, 1, 1.0),
        (torch.float16, 255, 1e-3),
        (torch.bfloat16, 257, 1e4),
        (torch.float32, 700, 1e20),
        (torch.float16, 64, 100.0),
    ):
        x = (torch.randn(rows, 2176, device="cuda") * magnitude).to(dtype)
        bias = torch.randn(1466, device="cuda").to(dtype)
        expected = linear_int8(x.float(), *weights, bias, layout)
        name = f"fused {dtype} {rows} rows of {magnitude:g}"
        checks.compare(name, f"fused {dtype}", run(x, weights, bias, MIXED), expected, _AFTER_CAST[dtype])
        strided = torch.stack((x, x), 1)[:, 0]
        checks.same(f"{name}, strided", run(strided, weights, bias, MIXED), run(x, weights, bias, MIXED))


def check_rows(checks: Checks, seed: int) -> None:
    """A row's bits do not depend on the other rows; rows of zeros and of what is no number stay what they are."""
    prepare([SINGLE[-1]])
    shards = SINGLE[-1]
    weights = weights_of(shards, seed)
    x = torch.randn(600, 1280, device="cuda")
    x[5], x[7, 3], x[9, 4] = 0, math.inf, math.nan
    together = run(x, weights, None, shards)
    for first, last in ((0, 1), (10, 11), (300, 557)):
        checks.same(f"rows {first}..{last} alone", run(x[first:last], weights, None, shards), together[first:last])
    checks.same("a row of zeros", together[5], torch.zeros_like(together[5]))
    checks.same("rows that are no numbers", together[[7, 9]].isfinite().any(), torch.zeros((), device="cuda") > 1)
    checks.same("the other rows", together[10:].isfinite().all(), torch.zeros((), device="cuda") < 1)


def check_graphs(checks: Checks, seed: int) -> None:
    """Replays of a graph, on fresh inputs, give what eager calls give."""
    prepare([MIXED])
    weights = weights_of(MIXED, seed)
    x = torch.randn(520, 2176, device="cuda").half()
    run(x, weights, None, MIXED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, weights, None, MIXED)
    for _ in range(3):
        x.normal_()
        graph.replay()
        checks.same("graph replay", out, run(x, weights, None, MIXED))


CHECKS = (check_kinds, check_fused, check_rows, check_graphs)


def check_all(checks: Checks, seed: int) -> None:
    """Every check."""
    torch.manual_seed(seed)
    for check in CHECKS:
        check(checks, seed)
