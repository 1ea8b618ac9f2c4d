"""Small calls of linears and routed experts by every kernel that the GPU has for them, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized linear

Without torch's caching allocator, so that a byte beyond a tensor is a byte beyond an allocation.
"""

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch first allocates

import torch

from vllm_exl3.cuda import dequantize, linear, moe
from vllm_exl3.cuda.moe_timing import ExpertShape, random_experts, random_routing
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook

ROWS = (1, 7, 16, 24, 70, 130)
"""The identities, narrow fp16, the kernel for 17 to 128 tokens, and prefill."""
FUSED = [
    Shard(8, Codebook.MUL1, 384, 256, 0, 200),
    Shard(5, Codebook.MUL1, 384, 128, 10, 100),
    Shard(6, Codebook.MCG, 384, 128, 0, 128),
]
LAYERS = [[Shard(8, Codebook.MUL1, 384, 384, 0, 384)], [Shard(6, Codebook.INST3, 384, 384, 0, 384)], FUSED]


def linears() -> None:
    """Single and fused layers, dense weights, and fast mode."""
    for shards in LAYERS:
        parts = [random_weights(shard, index) for index, shard in enumerate(shards)]
        tensors, layout = [torch.cat(column) for column in zip(*parts, strict=True)], pack_shards(shards)
        linear.prepare([(tuple(layout), 370)], torch.device("cuda", 0))
        for precision in ("default", "fast"):
            os.environ["VLLM_EXL3_PRECISION"] = precision
            for rows in ROWS:
                x = torch.randn(rows, 370, device="cuda", dtype=torch.bfloat16)
                assert linear.linear(x, *tensors, None, layout).isfinite().all(), (rows, precision)
        assert dequantize.dequantize(*tensors, layout, False, torch.float16).isfinite().all()


def experts() -> None:
    """Mixed bit rates, by the decode path and the grouped prefill."""
    shape = ExpertShape(experts=5, top_k=2, hidden=370, intermediate=320)
    layer = random_experts(shape, [(4.0, Codebook.MUL1), (3.0, Codebook.MCG)])
    layer.prepare()
    for tokens in (1, 9, 60, 300):
        x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
        assert moe.moe(x, *layer.arguments(random_routing(tokens, shape.experts, shape.top_k))).isfinite().all(), tokens


if __name__ == "__main__":
    {"linear": linears, "moe": experts}[sys.argv[1]]()
    torch.cuda.synchronize()
    print("done")
