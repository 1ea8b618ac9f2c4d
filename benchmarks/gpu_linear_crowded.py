"""The GPU linear beside other work: however late a block begins, the bits are the same.

Used by the tests in ``tests/gpu``.
"""

import math

import torch
from gpu_linear_checks import FORMS, Checks, prepare

from vllm_exl3.cuda import linear
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook


def check_crowded(checks: Checks, seed: int) -> None:
    """Graphs of several layers at once, beside products that fill the GPU: blocks then begin one after the other."""
    big = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    streams = [torch.cuda.Stream() for _ in range(4)]
    layers = ([4096], [4096, 1024, 1024], [14336, 14336])
    big @ big  # cuBLAS begins here, where an error is not that of kernels that run beside it
    prepare([[Shard(8, Codebook.MUL1, 4096, out, 0, out) for out in outs] for outs in layers], FORMS)
    for rows in (1, 4, 8, 16):
        replays, kept = [], []
        for index, outs in enumerate(layers):
            shards = [Shard(8, Codebook.MUL1, 4096, out, 0, out) for out in outs]
            parts = [random_weights(shard, seed + index) for shard in shards]
            tensors, layout = [torch.cat(column) for column in zip(*parts, strict=True)], pack_shards(shards)
            x = torch.randn(rows, 4096, device="cuda").half()
            expected = linear.linear(x, *tensors, None, layout)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [linear.linear(x, *tensors, None, layout) for _ in range(20)]
            kept.append((x, *tensors))  # a graph does not keep what it reads; the next capture unmaps what is free
            replays.append((graph, results, expected))
        for _ in range(10):
            for stream, (graph, results, _) in zip(streams, replays, strict=False):
                with torch.cuda.stream(stream):
                    for result in results:
                        result.fill_(math.nan)
                    graph.replay()
            with torch.cuda.stream(streams[-1]):
                for _ in range(4):
                    big @ big
            torch.cuda.synchronize()
            for _, results, expected in replays:
                for result in results:
                    checks.same(f"crowded M={rows}", result, expected)
