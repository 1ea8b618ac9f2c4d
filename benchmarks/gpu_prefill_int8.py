"""The GPU linear's fast mode for many tokens: is it what it says, and how fast is it.

    python benchmarks/gpu_prefill_int8.py --check               against the same arithmetic in PyTorch, and float64
    python benchmarks/gpu_prefill_int8.py --time --out FILE     whole linears, beside the default mode and cuBLAS bf16
    python benchmarks/gpu_prefill_int8.py --tiles --out FILE    every tile, for few tokens: what the hand-over rests on

A timing is as in gpu_prefill.py: one whole linear in a replayed CUDA graph, over more weights than the L2 holds. The
three of a cell are timed one after the other, since the clock follows what ran before. Nothing is timed where a check
fails.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_linear_checks import Checks, shape_of
from gpu_prefill_int8_checks import check_all

from vllm_exl3.cuda import prefill, prefill_int8, runtime
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.prefill_plan import INT8_TILES, PrefillArgs
from vllm_exl3.cuda.timing import Rotation, cublas_us, limit_us, random_trellis, replayed
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import write_results

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))
LOOP_TOPS = 1303.0
"""What a loop of int8 products with decoding reached without loads on an H200 (docs/kernels-gpu.md)."""

_SAVED_EVERY = 6.0
"""Seconds after which rows are written: a run may be cut."""

Row = dict[str, object]


def check(seed: int) -> bool:
    """All checks on fresh random inputs; prints the worst errors and every failure."""
    checks = Checks()
    check_all(checks, seed)
    return checks.report(seed)


class Bench:
    """Times cells and keeps a row of each.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows: list[Row] = []
        self._buffer = random_trellis(600_000_000)
        self._started = self._saved = time.perf_counter()
        device = runtime.device(torch.cuda.current_device())
        wanted: list[Instance] = [prefill_int8.QUANTIZE]
        for bits in arguments.bits:
            shard = (Shard(round(2 * bits), Codebook.MUL1, *SHAPES[0], 0, SHAPES[0][1]),)
            width = SHAPES[0][0]
            tiles = INT8_TILES
            wanted += [prefill_int8.plan(shard, tile, width, device.limits, tile).instance for tile in tiles]
            wanted += prefill.instances(shard, device.limits)
        device.prepare(wanted)
        print(f"compiled after {time.perf_counter() - self._started:.1f} s", flush=True)

    def run(self) -> None:
        """Time every cell, until the time is over."""
        for bits in self.arguments.bits:
            for shape in self.arguments.shapes:
                rotation = Rotation(shape, round(2 * bits), Codebook.MUL1, self._buffer)
                for rows in self.arguments.rows:
                    if time.perf_counter() - self._started > self.arguments.seconds:
                        print("out of time", flush=True)
                        return
                    self._cell(rotation, rows)
                if time.perf_counter() - self._saved > _SAVED_EVERY:
                    self.save()

    def _cell(self, rotation: Rotation, rows: int) -> None:
        shard = (rotation.shard,)
        x = torch.randn(rows, rotation.shard.in_features, device="cuda", dtype=torch.float16)
        out = x.new_empty((rows, rotation.shard.out_features))

        def fast(tile: int | None) -> Callable[[int], None]:
            def call(i: int) -> None:
                weights = rotation.trellis[i], rotation.suh, rotation.svh
                prefill_int8.prefill_int8(x, *weights, None, shard, out, tokens=tile)

            return call

        def default(i: int) -> None:
            prefill.prefill(x, rotation.trellis[i], rotation.suh, rotation.svh, None, shard, out)

        times = {}
        for tile in INT8_TILES if self.arguments.tiles else (None,):
            mode = f"int8_{tile or self._tile(rotation.shard, rows)}"
            times[mode] = self._add("native_fast", rotation, rows, mode, fast(tile))
        times["default"] = self._add("native", rotation, rows, "prefill", default)
        bf16 = cublas_us((rotation.shard.in_features, rotation.shard.out_features), rows)
        shape = f"{rotation.shard.in_features:5d}×{rotation.shard.out_features:<5d}"
        self.rows.append({
            "kernel": "cublas_bf16", "in": rotation.shard.in_features, "out": rotation.shard.out_features, "m": rows,
            "beside_bits": rotation.shard.half_bits / 2, "us": round(bf16, 2), "tflops": _tflops(rotation, rows, bf16),
        })  # fmt: skip
        line = ", ".join(f"{mode} {us:.1f} ({bf16 / us:.2f})" for mode, us in times.items())
        print(f"{shape} K={rotation.shard.half_bits / 2:<3g} M={rows:<5d} bf16 {bf16:.1f} µs; {line}", flush=True)

    def _tile(self, shard: Shard, rows: int) -> int:
        limits = runtime.device(torch.cuda.current_device()).limits
        rows = min(rows, prefill_int8.window_rows((shard,)))
        plan = prefill_int8.plan((shard,), rows, shard.in_features, limits)
        return int(PrefillArgs.from_buffer_copy(plan.arguments).tile_rows)

    def _add(self, kernel: str, rotation: Rotation, rows: int, mode: str, call: Callable[[int], object]) -> float:
        us = replayed(call, rotation.copies, self.arguments.repeats)
        shard = rotation.shard
        count = shard.in_features * shard.out_features
        limit = max(limit_us((shard.in_features, shard.out_features), shard.half_bits), 2e-6 * count * rows / LOOP_TOPS)
        self.rows.append({
            "kernel": kernel, "in": shard.in_features, "out": shard.out_features, "m": rows,
            "bits": shard.half_bits / 2, "codebook": Codebook.MUL1.label, "mode": mode, "us": round(us, 2),
            "tflops": _tflops(rotation, rows, us), **({"limit_us": round(limit, 2)} if kernel == "native_fast" else {}),
        })  # fmt: skip
        return us

    def save(self) -> None:
        """Write what was measured so far."""
        if self.arguments.out is None or not self.rows:
            return
        device = torch.cuda.get_device_properties(0)
        facts = {"multiprocessors": device.multi_processor_count, "cuda": torch.version.cuda}
        command = "python " + " ".join(sys.argv)
        write_results(self.arguments.out, self.rows, machine="h200", command=command, facts=facts)
        self._saved = time.perf_counter()


def _tflops(rotation: Rotation, rows: int, us: float) -> float:
    return round(2e-6 * rotation.shard.in_features * rotation.shard.out_features * rows / us, 1)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("check", "time", "tiles"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop timing after this long")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=list(SHAPES))
    parser.add_argument("--bits", type=float, nargs="*", default=[4, 3, 2])
    parser.add_argument("--rows", type=int, nargs="*", default=[2048, 128, 256, 1024, 8192, 4096, 512])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "little")
    good = check(seed) if arguments.check else True
    if not good or not (arguments.time or arguments.tiles):
        return 0 if good else 1
    bench = Bench(arguments)
    bench.run()
    bench.save()
    return 0


if __name__ == "__main__":
    assert importlib.util.find_spec("cuda.bindings"), "cuda-bindings is missing"
    sys.exit(main())
