"""exllamav3 itself as the backend of the linear op, against float64; skipped where torch sees no GPU or it is absent.

In its fp16 mode: the default one quantizes activations to int8, which the benchmark beside the kernels' shows.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
os.environ["EXL3_INT8_GEMV"] = "0"  # read when its extension loads
pytest.importorskip("exllamav3")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_linear_checks import HALF_BITS, exact, relative

from vllm_exl3.cuda import exllamav3, exllamav3_rows
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.ngram import NgramTable, ngram_reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook

ROWS = (1, 3, 16, 33, 144, 145, 1200)
"""Both sides of where exllamav3 turns to decoding whole matrices, and of where it folds the transforms in."""
LIMIT = 3e-3
KINDS = [
    (codebook, half_bits)
    for codebook in Codebook
    for half_bits in HALF_BITS
    if half_bits % 2 == 0 or codebook is Codebook.MUL1
]


def layer(
    shards: list[Shard], seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    parts = [random_weights(shard, seed + index) for index, shard in enumerate(shards)]
    trellis, suh, svh = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return trellis, suh, svh, parts


def expected(x: torch.Tensor, shards: list[Shard], parts: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    return torch.cat([exact(x, shard, *part) for shard, part in zip(shards, parts, strict=True)], dim=1)


def test_it_is_usable() -> None:
    assert exllamav3.unavailable() is None


@pytest.mark.parametrize(("codebook", "half_bits"), KINDS, ids=lambda value: str(getattr(value, "label", value)))
def test_every_kind(codebook: Codebook, half_bits: int) -> None:
    shards = [Shard(half_bits, codebook, 512, 384, 0, 384)]
    trellis, suh, svh, parts = layer(shards)
    for rows in ROWS:
        x = torch.randn(rows, 512, device="cuda").half()
        found = exllamav3.linear(x, trellis, suh, svh, None, tuple(pack_shards(shards)))
        assert relative(found, expected(x, shards, parts)) <= LIMIT, rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fused_layers_with_crops_and_bias(dtype: torch.dtype) -> None:
    shards = [
        Shard(8, Codebook.MUL1, 640, 512, 0, 512),
        Shard(5, Codebook.MUL1, 640, 256, 64, 128),
        Shard(6, Codebook.MCG, 640, 128, 0, 100),
        Shard(2, Codebook.INST3, 640, 256, 10, 246),
    ]
    trellis, suh, svh, parts = layer(shards)
    bias = torch.randn(512 + 128 + 100 + 246, device="cuda").to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, 600, device="cuda").to(dtype)
        found = exllamav3.linear(x, trellis, suh, svh, bias, tuple(pack_shards(shards)))
        assert found.dtype == dtype
        assert found.shape == (rows, 986)
        limit = 6e-3 if dtype == torch.bfloat16 else LIMIT
        assert relative(found, expected(x, shards, parts) + bias.double()) <= limit, rows


def test_a_captured_graph_repeats_the_eager_bits() -> None:
    shards = [Shard(8, Codebook.MUL1, 512, 1024, 0, 1024), Shard(6, Codebook.MCG, 512, 256, 0, 256)]
    trellis, suh, svh, _ = layer(shards)
    layout = tuple(pack_shards(shards))
    for rows in (1, 8, 64):
        x = torch.randn(rows, 512, device="cuda").half()
        for _ in range(3):  # it tunes itself at the first calls
            eager = exllamav3.linear(x, trellis, suh, svh, None, layout)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = exllamav3.linear(x, trellis, suh, svh, None, layout)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, eager), rows


def test_weights_loaded_in_place_are_seen() -> None:
    shards = [Shard(8, Codebook.MUL1, 512, 512, 0, 512)]
    trellis, suh, svh, _ = layer(shards)
    x = torch.randn(2, 512, device="cuda").half()
    layout = tuple(pack_shards(shards))
    exllamav3.linear(x, trellis, suh, svh, None, layout)
    others = layer(shards, 9)
    for tensor, other in zip((trellis, suh, svh), others[:3], strict=True):
        tensor.copy_(other)
    found = exllamav3.linear(x, trellis, suh, svh, None, layout)
    assert relative(found, expected(x, shards, others[3])) <= LIMIT


@pytest.mark.parametrize("bits", range(1, 9))
def test_ngram_rows(bits: int) -> None:
    assert exllamav3_rows.unavailable() is None
    generator = torch.Generator().manual_seed(bits)
    rows = torch.randint(-(2**15), 2**15, (64, 1 + 10 * bits), generator=generator, dtype=torch.int16)
    rows[:, 0] = (0.1 + torch.rand(64, generator=generator)).half().view(torch.int16)
    ids = torch.randint(0, len(rows), (3, 7), generator=generator)
    bias = torch.rand((2, 160), generator=generator).half()
    host = NgramTable(bias, torch.tensor([0, 40]), 0)
    there = NgramTable(bias.cuda(), host.offsets.cuda(), 0)
    found, wanted = torch.empty((*ids.shape, 160), device="cuda"), torch.empty((*ids.shape, 160))
    exllamav3_rows.ngram(ids.cuda(), None, rows.cuda(), there, found)
    ngram_reference(ids, None, rows, host, wanted)
    assert relative(found.cpu(), wanted.double()) <= 1e-3
