"""The GPU linear's fast mode for many tokens: is it what it says, and how fast is it.

    python benchmarks/gpu_prefill_int8.py --check               against the same arithmetic in PyTorch, and float64
    python benchmarks/gpu_prefill_int8.py --time --out FILE     whole linears, beside the default mode and cuBLAS bf16
    python benchmarks/gpu_prefill_int8.py --tiles --out FILE    every tile, for few tokens: what the hand-over rests on

A timing is as in gpu_prefill.py: one whole linear in a replayed CUDA graph, over more weights than the L2 holds. The
three of a cell are timed one after the other, since the clock follows what ran before. Nothing is timed where a check
fails.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_linear_checks import Checks, shape_of
from gpu_prefill_bench import SHAPES, Bench, tflops
from gpu_prefill_int8_checks import check_all

from vllm_exl3.cuda import prefill, prefill_int8
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.prefill_input import QUANTIZE
from vllm_exl3.cuda.prefill_plan import INT8_TILES, PrefillArgs
from vllm_exl3.cuda.timing import Rotation, cublas_us, replayed
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import need_gpus

LOOP_TOPS = 1303.0
"""What a loop of int8 products with decoding reached without loads on an H200 (docs/kernels-gpu.md)."""


def check(seed: int) -> bool:
    """All checks on fresh random inputs; prints the worst errors and every failure."""
    checks = Checks()
    check_all(checks, seed)
    return checks.report(seed)


class FastBench(Bench):
    """Times cells in fast mode, in the default mode and by cuBLAS.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        wanted: list[Instance] = [QUANTIZE]
        for bits in arguments.bits:
            shard = (Shard(round(2 * bits), Codebook.MUL1, *SHAPES[0], 0, SHAPES[0][1]),)
            wanted += [prefill_int8.plan(shard, n, SHAPES[0][0], self.limits, n).instance for n in INT8_TILES]
            wanted += prefill.instances(shard, self.limits)
        self.prepare(wanted)

    def run(self) -> None:
        """Time every cell, until the time is over."""
        for rotation, rows in self.cells([(bits, Codebook.MUL1) for bits in self.arguments.bits], self.arguments.rows):
            self._cell(rotation, rows)

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
        width, height, bits = rotation.shard.in_features, rotation.shard.out_features, rotation.shard.half_bits / 2
        bf16 = cublas_us((width, height), rows)
        self.rows.append({
            "kernel": "cublas_bf16", "in": width, "out": height, "m": rows, "beside_bits": bits,
            "us": round(bf16, 2), "tflops": tflops((width, height), rows, bf16),
        })  # fmt: skip
        line = ", ".join(f"{mode} {us:.1f} ({bf16 / us:.2f})" for mode, us in times.items())
        print(f"{width:5d}×{height:<5d} K={bits:<3g} M={rows:<5d} bf16 {bf16:.1f} µs; {line}", flush=True)

    def _tile(self, shard: Shard, rows: int) -> int:
        rows = min(rows, prefill.window_rows((shard,), rows, int8=True))
        plan = prefill_int8.plan((shard,), rows, shard.in_features, self.limits)
        return int(PrefillArgs.from_buffer_copy(plan.arguments).tile_rows)

    def _add(self, kernel: str, rotation: Rotation, rows: int, mode: str, call: Callable[[int], object]) -> float:
        us = replayed(call, rotation.copies, self.arguments.repeats)
        self.keep(kernel, rotation, rows, mode, us, LOOP_TOPS if kernel == "native_fast" else None)
        return us


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
    need_gpus()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "little")
    good = check(seed) if arguments.check else True
    if not good or not (arguments.time or arguments.tiles):
        return 0 if good else 1
    bench = FastBench(arguments)
    bench.run()
    bench.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
