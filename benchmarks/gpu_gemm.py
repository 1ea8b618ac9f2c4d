"""The GPU linear for 8 to 128 tokens: is its GEMM right, how fast is it, and what does dispatch pick.

    python benchmarks/gpu_gemm.py --check               against float64
    python benchmarks/gpu_gemm.py --time --out FILE     the GEMM, what dispatch picks, and cuBLAS bf16, in turns

A timing is as in gpu_prefill.py: one whole linear in a replayed CUDA graph, over more weights than the L2 holds; the
three of a cell take turns, so that what the GPU's clock does, it does to all. Nothing is timed where a check fails.
Each row has ``us`` of the GEMM whether dispatch picks it or not, ``now_us`` of what it picks (``now``), ``bf16_us``,
and ``bound_us``, below which the GPU cannot stay (`vllm_exl3.cuda.timing.bound_us`).
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_gemm_checks import check_all
from gpu_linear_checks import Checks, shape_of
from gpu_prefill_bench import SHAPES, CublasBench
from gpu_prefill_cliffs import used

from vllm_exl3.cuda import gemm, linear
from vllm_exl3.cuda.gemm_plan import plan_gemm, refusal
from vllm_exl3.cuda.timing import Rotation, bound_us, replayed_in_turns
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import need_gpus


def check(seed: int) -> bool:
    """All checks on fresh random inputs; prints the worst errors and every failure."""
    checks = Checks()
    check_all(checks, seed)
    return checks.report(seed)


class GemmBench(CublasBench):
    """Times the GEMM, what dispatch picks, and cuBLAS.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.kinds = [(bits, Codebook.MUL1) for bits in arguments.bits]
        self.kinds += [(bits, codebook) for codebook in arguments.codebooks for bits in arguments.other_bits]
        shards = [
            Shard(round(2 * bits), codebook, *shape, 0, shape[1])
            for bits, codebook in self.kinds
            for shape in arguments.shapes
        ]
        if (reason := refusal(shards[:1], self.limits)) is not None:
            raise SystemExit(f"this GPU does not run the GEMM: {reason}")
        wanted = [i for shard in shards for rows in arguments.rows for i in used(shard, rows, self.limits)[1]]
        for shard in shards:
            for rows in arguments.rows:
                plan = plan_gemm((shard,), rows, shard.in_features, self.limits)
                wanted += [plan.transform.instance, plan.instance]
        self.prepare(dict.fromkeys(wanted))

    def time(self, rotation: Rotation, rows: int) -> None:
        """Time a cell, and keep its row."""
        shard = rotation.shard
        shape = (shard.in_features, shard.out_features)
        x = torch.randn(rows, shape[0], device="cuda", dtype=torch.float16)
        out = x.new_empty((rows, shape[1]))
        suh, svh = rotation.suh, rotation.svh
        calls: dict[str, tuple[Callable[[int], object], int]] = {
            "gemm": (lambda i: gemm.gemm(x, rotation.trellis[i], suh, svh, None, (shard,), out), rotation.copies),
            "now": (
                lambda i: linear.linear(x, rotation.trellis[i], suh, svh, None, rotation.layout),
                rotation.copies,
            ),
            "bf16": self.dense(shape, rows),
        }
        times = replayed_in_turns(calls, self.arguments.repeats)
        now, _ = used(shard, rows, self.limits)
        weights = shape[0] * shape[1]
        bound = bound_us(weights * shard.half_bits / 16, weights, 2.0 * weights * rows)
        self.keep(
            "native", rotation, rows, "gemm", times["gemm"], None, now=now, now_us=round(times["now"], 2),
            bf16_us=round(times["bf16"], 2), bound_us=round(bound, 2),
        )  # fmt: skip
        self.note_bf16(shape, rows, times["bf16"])
        cell = (
            f"{shape[0]:5d}×{shape[1]:<5d} {Codebook(shard.codebook).label:5s} K={shard.half_bits / 2:<3g} M={rows:<3d}"
        )
        print(
            f"{cell} gemm {times['gemm']:7.1f} µs  {now:11s} {times['now']:7.1f} µs  bf16 {times['bf16']:7.1f} µs "
            f"({times['bf16'] / times['gemm']:5.2f})  bound {bound:6.1f} µs",
            flush=True,
        )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop timing after this long")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=[*SHAPES, (4096, 6144), (4096, 28672)])
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 16, 24, 32, 40, 48, 56, 64, 96, 128])
    parser.add_argument("--bits", type=float, nargs="*", default=[4, 2, 3, 6], help="K of mul1")
    parser.add_argument("--codebooks", type=int, nargs="*", default=[1, 0], help="besides mul1")
    parser.add_argument("--other-bits", type=float, nargs="*", default=[4], help="K of the other codebooks")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "little")
    good = check(seed) if arguments.check else True
    if not good or not arguments.time:
        return 0 if good else 1
    bench = GemmBench(arguments)
    for rotation, rows in bench.cells(bench.kinds, arguments.rows):
        bench.time(rotation, rows)
    bench.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
