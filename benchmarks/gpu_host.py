#!/usr/bin/env python3
"""Host time of one linear: how long a call takes that only queues work on the GPU, beside torch's own linear.

    python benchmarks/gpu_host.py [--out benchmarks/results/h200/host.json]

A process that serves without a CUDA graph, as it does for prompts of an uncaptured size, cannot be faster than its
calls. Calls go through ``torch.ops``, as a served layer's do. Each count of tokens is one way to serve a layer: one
kernel, a rotation and the GEMM, or the kernels for prompts. Fewer calls are queued than the driver holds, so none waits
for the GPU; the median of several series counts.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_exl3.cuda import linear
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import need_gpus, write_results

CALLS, SERIES = 100, 15
TOKENS = (1, 8, 16, 32, 128, 256, 1024)
LAYERS = {"o": (4096, (4096,)), "qkv": (4096, (4096, 1024, 1024))}
"""Input width and output widths of what a layer fuses."""


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call's host time."""
    for _ in range(20):
        call()
    series = []
    for _ in range(SERIES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        series.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(series)


def measure(name: str, tokens: int) -> dict[str, object]:
    """A row: the op and torch's linear of the same shape in bf16."""
    width, outputs = LAYERS[name]
    shards = [Shard(8, Codebook.MUL1, width, size, 0, size) for size in outputs]
    layout = pack_shards(shards)
    parts = zip(*(random_weights(shard, index) for index, shard in enumerate(shards)), strict=True)
    trellis, suh, svh = (torch.cat(part) for part in parts)
    linear.prepare([(tuple(layout), width)], trellis.device)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    dense = torch.randn(sum(outputs), width, device="cuda", dtype=torch.bfloat16)
    ours = host_us(lambda: torch.ops.vllm_exl3.linear(x, trellis, suh, svh, None, layout, "linear"))
    theirs = host_us(lambda: torch.nn.functional.linear(x, dense))
    return {"layer": name, "m": tokens, "us": round(ours, 2), "torch_us": round(theirs, 2)}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus()
    rows = []
    with torch.inference_mode():
        for name in LAYERS:
            for tokens in TOKENS:
                rows.append(row := measure(name, tokens))
                above = f"{row['us'] - row['torch_us']:+.1f}"  # type: ignore[operator]
                print(
                    f"{name:4s} M={tokens:<5d} {row['us']:6.1f} µs, torch {row['torch_us']:6.1f} µs ({above})",
                    flush=True,
                )
    if arguments.out:
        write_results(arguments.out, rows, machine="h200", command="python benchmarks/gpu_host.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
