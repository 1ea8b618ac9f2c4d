#!/usr/bin/env python3
"""The CPU linears beside torch's bf16 linear, in one run on the same threads, with weights beyond the caches.

    python benchmarks/cpu_linear.py [--rows 1 4 16 128] [--shapes 4096x4096 4096x14336] [--rounds 30] [--write]

Each round times the peer and every kernel once, so that whatever else the machine does meets all of
them alike; each call takes the next of several weights that together exceed the last-level cache.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_exl3.cpu import backend
from vllm_exl3.cpu.library import library
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_linear.json"
BEYOND_CACHE = 160 << 20
"""Bytes of weights that one kernel's calls go round."""

EVERY_RATE = [(Codebook.MUL1, half_bits) for half_bits in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)]
KINDS = [*EVERY_RATE, (Codebook.MCG, 8), (Codebook.INST3, 8), (Codebook.MCG, 4), (Codebook.MCG, 16)]

Call = Callable[[int], object]


class Trellis:
    """Random trellises of one kind and shape, and a call that multiplies by the next of them."""

    def __init__(self, codebook: Codebook, half_bits: int, in_features: int, out_features: int) -> None:
        self.shard = Shard(half_bits, codebook, in_features, out_features, 0, out_features)
        self.layout = tuple(pack_shards([self.shard]))
        copies = max(2, BEYOND_CACHE // (2 * self.shard.trellis_words))
        self.words = [self._random() for _ in range(copies)]
        self.suh, self.svh = torch.randn(in_features).half(), torch.randn(out_features).half()

    def _random(self) -> torch.Tensor:
        return torch.randint(-(1 << 15), 1 << 15, (self.shard.trellis_words,), dtype=torch.int16)

    def __call__(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Multiply by the trellis whose turn it is."""
        words = self.words[turn % len(self.words)]
        return backend.linear(x, words, self.suh, self.svh, None, self.layout)

    def error(self, x: torch.Tensor) -> float:
        """Relative Frobenius error against float64 mathematics of the decoded weights."""
        weight = decode(self.words[0].view(self.shard.trellis_shape), self.shard.half_bits, self.shard.codebook)
        rotated = hadamard(x.double() * self.suh.double())
        expected = hadamard(rotated @ weight.double()) * self.svh.double()
        return float((self(x, 0).double() - expected).norm() / expected.norm())


def measure(calls: dict[Any, Call], rounds: int) -> dict[Any, list[float]]:
    """Microseconds of each call in each round, after two rounds to warm up."""
    times: dict[Any, list[float]] = {key: [] for key in calls}
    for turn in range(-2, rounds):
        for key, call in calls.items():
            start = time.perf_counter()
            call(turn)
            if turn >= 0:
                times[key].append((time.perf_counter() - start) * 1e6)
    return times


def read_bandwidth() -> float:
    """Bytes a nanosecond that all threads read from memory together: the best of some sums."""
    values = torch.ones(128 << 20, dtype=torch.int32)
    times = measure({"read": lambda _: values.sum(dtype=torch.int32)}, 12)["read"]
    return values.nbytes / min(times) / 1e3


def compare(in_features: int, out_features: int, rows: int, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """One row for the peer and one for each kind."""
    x = torch.randn(rows, in_features).bfloat16()
    dense_bytes = 2 * in_features * out_features
    dense = [torch.randn(out_features, in_features).bfloat16() for _ in range(max(2, BEYOND_CACHE // dense_bytes))]
    kinds = {kind: Trellis(*kind, in_features, out_features) for kind in KINDS}
    calls: dict[Any, Call] = {"peer": lambda turn: torch.nn.functional.linear(x, dense[turn % len(dense)])}
    for kind, trellis in kinds.items():
        calls[kind] = lambda turn, trellis=trellis: trellis(x, turn)
    times = measure(calls, rounds)
    peer = statistics.median(times["peer"])
    result = []
    for key, samples in times.items():
        us, least = statistics.median(samples), min(samples)
        shard = None if key == "peer" else kinds[key].shard
        size = dense_bytes if shard is None else 2 * shard.trellis_words
        limit = size / bandwidth / 1e3
        result.append(
            {
                "kernel": "torch_bf16" if shard is None else "native",
                "in": in_features,
                "out": out_features,
                "m": rows,
                "bits": 16 if shard is None else shard.half_bits / 2,
                "codebook": None if shard is None else Codebook(shard.codebook).label,
                "us": round(us, 1),
                "us_least": round(least, 1),
                "gbps": round(size / us / 1e3, 2),
                "limit_us": round(limit, 1),
                "of_bandwidth": round(limit / us, 3),
                "over_torch_bf16": round(peer / us, 3),
            }
        )
        name = "torch bf16" if shard is None else f"{Codebook(shard.codebook).label:5s} K={shard.half_bits / 2:g}"
        print(
            f"{in_features}x{out_features} M={rows:<4d}{name:12s} {us:9.0f} us (least {least:.0f}) "
            f"{size / us / 1e3:6.2f} GB/s, {limit / us:4.0%} of bandwidth, {peer / us:5.2f} x torch bf16",
            flush=True,
        )
    return result


def errors() -> list[dict[str, Any]]:
    """Accuracy of every kind, for one row and for many."""
    result = []
    for codebook, half_bits in KINDS:
        trellis = Trellis(codebook, half_bits, 2048, 1024)
        for rows in (1, 64):
            error = trellis.error(torch.randn(rows, 2048))
            result.append(
                {"kernel": "native", "in": 2048, "out": 1024, "m": rows, "bits": half_bits / 2}
                | {"codebook": codebook.label, "error": float(f"{error:.3g}")}
            )
    print("largest relative error:", max(row["error"] for row in result))
    return result


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "4096x14336"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/cpu/cpu_linear.json")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    isa = library().exl3_isa().decode()
    print(f"{isa}, {torch.get_num_threads()} threads, reads {bandwidth:.1f} GB/s", flush=True)
    rows: list[dict[str, Any]] = [{"kernel": "read_bandwidth", "gbps": round(bandwidth, 1), "isa": isa}, *errors()]
    for shape in arguments.shapes:
        in_features, out_features = map(int, shape.split("x"))
        for count in arguments.rows:
            rows += compare(in_features, out_features, count, arguments.rounds, bandwidth)
    if arguments.write:
        write_results(RESULTS, rows, machine="cpu", command="python benchmarks/cpu_linear.py --write")


if __name__ == "__main__":
    main()
