"""The prefill kernel against float64: kinds, tiles, cuts of k, fused layers, dtypes, magnitudes, graphs.

Used by ``gpu_prefill.py --check`` and by the tests in ``tests/gpu``.
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence

import torch
from gpu_linear_checks import KINDS, Checks, exact, sample_of_kinds

from vllm_exl3.cuda import dequantize, linear, prefill, reconstruct, runtime
from vllm_exl3.cuda.prefill_input import input_instances
from vllm_exl3.cuda.prefill_plan import FINISH, MMA_TILES, TILES, plan_prefill
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook

MIXED = (
    Shard(8, Codebook.MUL1, 2176, 1024, 0, 1024),
    Shard(10, Codebook.MUL1, 2176, 256, 0, 192),
    Shard(5, Codebook.MUL1, 2176, 384, 64, 250),
    Shard(6, Codebook.MCG, 2176, 128, 0, 128),
)


def run(
    x: torch.Tensor,
    tensors: Iterable[torch.Tensor],
    bias: torch.Tensor | None,
    shards: Iterable[Shard],
    tokens: int | None = None,
    ranges: int | None = None,
) -> torch.Tensor:
    """The prefill kernel into an output that is poisoned before."""
    layout = tuple(shards)
    out = torch.full((x.shape[0], sum(shard.crop_size for shard in layout)), math.nan, dtype=x.dtype, device=x.device)
    trellis, suh, svh = tensors
    prefill.prefill(x, trellis, suh, svh, bias, layout, out, tokens=tokens, ranges=ranges)
    return out


def prepare(layers: Iterable[tuple[Shard, ...]], tiles: Iterable[int] = TILES) -> None:
    """Compile, in parallel, what these layers need."""
    device = runtime.device(torch.cuda.current_device())
    wanted = [*input_instances(device.limits), FINISH]
    for shards in layers:
        plans = [plan_prefill(shards, tokens, shards[0].in_features, device.limits, tokens) for tokens in tiles]
        wanted += [plan.instance for plan in plans]
        wanted += [dequantize.dequantize_instance(shard) for shard in shards]
    started = time.perf_counter()
    device.prepare(wanted)
    print(f"{len(set(wanted))} kernels ready after {time.perf_counter() - started:.1f} s", flush=True)


def check_kinds(checks: Checks, seed: int) -> None:
    """`check_every_kind` of a sample, of which every tile has some."""
    check_every_kind(checks, seed, sample_of_kinds(seed))


def check_every_kind(checks: Checks, seed: int, kinds: Sequence[tuple[int, Codebook]] = KINDS) -> None:
    """Every K and codebook on an odd number of n tiles; tiles and cuts of k take turns."""
    shards = [Shard(half_bits, codebook, 1024, 896, 0, 896) for half_bits, codebook in kinds]
    for tile, tokens in enumerate(TILES):
        prepare([(shard,) for index, shard in enumerate(shards) if (index + tile) % 2 == 0], (tokens,))
    for index, shard in enumerate(shards):
        tensors = random_weights(shard, seed + index)
        x = torch.randn(300, 1024, device="cuda")
        expected = exact(x, shard, *tensors)
        for tile, tokens in enumerate(TILES):
            if (index + tile) % 2:
                continue
            for rows in (1, 37, 300):
                for ranges in (0, None, 9):
                    found = run(x[:rows], tensors, None, (shard,), tokens, ranges)
                    name = f"K={shard.half_bits / 2} {Codebook(shard.codebook).label} {tokens} M={rows} ranges={ranges}"
                    checks.compare(name, f"prefill{tokens}", found, expected[:rows])
        found = reconstruct.linear(x, *tensors, None, pack_shards([shard]))
        checks.compare(f"reconstruct K={shard.half_bits / 2}", "reconstruct", found, expected)


def check_layers(checks: Checks, seed: int) -> None:
    """A fused layer of mixed kinds with crops, a narrow strided input, bias, every dtype; the same bits twice."""
    prepare([MIXED])
    parts = [random_weights(shard, seed + index) for index, shard in enumerate(MIXED)]
    tensors = [torch.cat(column) for column in zip(*parts, strict=True)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(150, 2 * 2100, device="cuda").to(dtype)[:, :2100]
        bias = torch.randn(sum(shard.crop_size for shard in MIXED), device="cuda").to(dtype)
        expected = torch.cat([exact(x, shard, *part) for shard, part in zip(MIXED, parts, strict=True)], dim=1) + bias
        limit = {torch.float16: 6e-4, torch.bfloat16: 3e-3, torch.float32: 5e-4}[dtype]
        for tokens in TILES:
            for ranges in (0, None, 20):
                found = run(x, tensors, bias, MIXED, tokens, ranges)
                checks.compare(f"mixed {dtype} {tokens} {ranges}", f"mixed {dtype}", found, expected, limit)
                checks.same(
                    f"mixed {dtype} {tokens} {ranges} twice", run(x, tensors, bias, MIXED, tokens, ranges), found
                )
        found = reconstruct.linear(x, *tensors, bias, pack_shards(MIXED))
        checks.compare(f"reconstruct {dtype}", f"reconstruct {dtype}", found, expected, max(limit, 1e-3) * 1.5)


def check_magnitudes(checks: Checks, seed: int) -> None:
    """Rows of any magnitude, with outliers; rows of zeros, and NaNs, which stay in their row."""
    shard = Shard(6, Codebook.MUL1, 14336, 512, 0, 512)
    prepare([(shard,)], (64, 256))
    tensors = random_weights(shard, seed)
    for magnitude in (1e-20, 1e-3, 1.0, 1e4, 1e20):
        x = torch.randn(70, 14336, device="cuda") * magnitude
        x[0, 17] = 3000 * magnitude
        expected = exact(x, shard, *tensors)
        for tokens in (64, 256):
            found = run(x, tensors, None, (shard,), tokens)
            for row in (0, 1, 69):
                checks.compare(f"{magnitude} {tokens} row {row}", "magnitude", found[row], expected[row], 7e-4)
    x = torch.randn(67, 14336, device="cuda")
    x[1] = 0
    x[2, 5] = math.nan
    for tokens in (64, 256):
        found = run(x, tensors, None, (shard,), tokens)
        checks.done += 1
        if not (found[1] == 0).all() or not found[2].isnan().all() or found[[0, *range(3, 67)]].isnan().any():
            checks.failed.append(f"{tokens}: zero and NaN rows came out wrong")


def check_rotation(checks: Checks, seed: int) -> None:
    """16-bit rows rotated on tensor cores, in clusters of every size: outliers where the scale is not guessed from."""
    for shard in (Shard(8, Codebook.MUL1, 8192, 256, 0, 256), Shard(6, Codebook.MUL1, 1152, 256, 0, 256)):
        prepare([(shard,)], (64, 256))
        tensors, width = random_weights(shard, seed), shard.in_features - 24
        for dtype, limit in ((torch.float16, 7e-4), (torch.bfloat16, 3e-3)):
            x = torch.randn(2100, width, device="cuda")
            x[0], x[3], x[7] = x[0] * 10, 0, x[7] * 1e-3
            x[1, 900], x[9, 7] = 5000, -5000
            x[4, :128], x[6, :128] = 0, x[6, :128] * 1e-3
            x[5, 700] = math.nan
            x = x.to(dtype)
            expected = exact(x, shard, *tensors)
            for rows in (17, 250, 510, 1000, 2100):
                found = run(x[:rows], tensors, None, (shard,), 64 if rows < 100 else 256)
                kept = [row for row in range(rows) if row not in (3, 5)]
                checks.compare(f"{dtype} {width} M={rows}", f"rotated {dtype}", found[kept], expected[kept], limit)
                for row in (0, 1, 4, 6, 7, 9, 10, rows - 1):
                    name = f"{dtype} {width} M={rows} row {row}"
                    checks.compare(name, f"rotated row {dtype}", found[row], expected[row], limit)
                checks.done += 1
                if not (found[3] == 0).all() or not found[5].isnan().all():
                    checks.failed.append(f"{dtype} {width} M={rows}: zero and NaN rows came out wrong")


def check_large(checks: Checks, seed: int) -> None:
    """Full rounds of tiles and the rest cut; what dispatch chooses; a replayed graph; several windows of rows."""
    for shard in (Shard(4, Codebook.MUL1, 4096, 14336, 0, 14336), Shard(8, Codebook.MCG, 3968, 4096, 0, 4096)):
        prepare([(shard,)])
        tensors, layout = random_weights(shard, seed), pack_shards([shard])
        x = torch.randn(1100, shard.in_features, device="cuda").half()
        expected = exact(x, shard, *tensors)
        for tokens in (*TILES, None):
            checks.compare(f"large {tokens}", "large", run(x, tensors, None, (shard,), tokens), expected, 6e-4)
        linear.prepare([(tuple(layout), shard.in_features)], x.device)
        for rows in (65, 128, 129, 300, 1100):
            found = linear.linear(x[:rows], *tensors, None, layout)
            checks.compare(f"dispatched M={rows}", "large", found, expected[:rows], 6e-4)
        graph = torch.cuda.CUDAGraph()
        eager = linear.linear(x, *tensors, None, layout)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = linear.linear(x, *tensors, None, layout)
        for _ in range(2):
            captured.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            checks.same("graph", captured, eager)


def check_without_wgmma(checks: Checks, seed: int) -> None:
    """The kernel of GPUs without wgmma, which runs on others as well: kinds, tiles, cuts of k, a mixed layer."""
    device = runtime.device(torch.cuda.current_device())
    others = dataclasses.replace(device.limits, architecture="sm_90")  # without its special instructions
    layers = [
        (Shard(half_bits, codebook, 1024, 896, 0, 896),) for half_bits, codebook in ((8, 2), (5, 2), (6, 1), (16, 0))
    ]
    plans = [
        plan_prefill(layer, 1, layer[0].in_features, others, tokens)
        for layer in (*layers, MIXED)
        for tokens in MMA_TILES
    ]
    device.prepare([*input_instances(others), FINISH, *(plan.instance for plan in plans)])
    for layer in (*layers, MIXED):
        parts = [random_weights(shard, seed + index) for index, shard in enumerate(layer)]
        tensors = [torch.cat(column) for column in zip(*parts, strict=True)]
        x = torch.randn(200, layer[0].in_features, device="cuda")
        expected = torch.cat([exact(x, shard, *part) for shard, part in zip(layer, parts, strict=True)], dim=1)
        for tokens in MMA_TILES:
            for rows in (1, 100, 200):
                for ranges in (0, None, 11):
                    out = torch.full((rows, expected.shape[1]), math.nan, device="cuda")
                    prefill.prefill(x[:rows], *tensors, None, layer, out, tokens=tokens, ranges=ranges, limits=others)
                    checks.compare(f"mma {layer} {tokens} M={rows} {ranges}", "mma.sync", out, expected[:rows])


CHECKS = (check_every_kind, check_layers, check_magnitudes, check_rotation, check_large, check_without_wgmma)


def check_all(checks: Checks, seed: int) -> None:
    """Everything, on inputs of this seed."""
    torch.manual_seed(seed)
    for check in CHECKS:
        check(checks, seed)
