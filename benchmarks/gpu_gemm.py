"""The GPU linear for 8 to 128 tokens: is its GEMM right, how fast is it, and what does dispatch pick.

    python benchmarks/gpu_gemm.py --check               against float64
    python benchmarks/gpu_gemm.py --time --out FILE     the GEMM, what dispatch picks, and cuBLAS bf16, in turns

A timing is as in gpu_prefill.py: one whole linear in a replayed CUDA graph, over more weights than the L2 holds; the
three of a cell take turns, so that what the GPU's clock does, it does to all. Nothing is timed where a check fails.
Each row has ``us`` of the GEMM whether dispatch picks it or not, ``now_us`` of what it picks (``now``), ``bf16_us``,
and ``bound_us``, below which the GPU cannot stay (`vllm_exl3.cuda.timing.bound_us`).

Rows with ``parts`` are of fused layers, as vLLM has query, key and value, and gate and up: what dispatch picks for all
parts in one call, and cuBLAS with one weight of their size.
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
from vllm_exl3.cuda.timing import Rotation, bound_us, random_weights, replayed_in_turns, rotated_copies
from vllm_exl3.ops.shards import Shard, pack_shards
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

    def time_fused(self, width: int, parts: tuple[int, ...]) -> None:
        """Time a layer of several parts at every number of tokens, and keep its rows."""
        shards = [Shard(8, Codebook.MUL1, width, size, 0, size) for size in parts]
        layout, words = pack_shards(shards), sum(shard.trellis_words for shard in shards)
        linear.prepare([(tuple(layout), width)], torch.device("cuda", torch.cuda.current_device()))
        copies = rotated_copies(2 * words)
        step = min(words, (self._buffer.numel() - words) // copies // 1024 * 1024)
        trellis = [self._buffer[index * step : index * step + words] for index in range(copies)]
        suh, svh = (torch.cat(part) for part in zip(*(random_weights(s, 1)[1:] for s in shards), strict=True))
        for rows in self.arguments.fused_rows:
            x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            calls: dict[str, tuple[Callable[[int], object], int]] = {
                "now": (lambda i, x=x: linear.linear(x, trellis[i], suh, svh, None, layout), copies),
                "bf16": self.dense((width, sum(parts)), rows),
            }
            times = replayed_in_turns(calls, self.arguments.repeats)
            self.rows.append(
                {"kernel": "native", "in": width, "out": sum(parts), "parts": list(parts), "m": rows, "bits": 4.0,
                 "codebook": "mul1", "now_us": round(times["now"], 2), "bf16_us": round(times["bf16"], 2)}
            )  # fmt: skip
            share = times["bf16"] / times["now"]
            cell = f"{width}×{'+'.join(map(str, parts))} M={rows:<4d}"
            print(f"{cell} {times['now']:7.1f} µs  bf16 {times['bf16']:7.1f} µs ({share:5.2f})", flush=True)


def fused_of(text: str) -> tuple[int, tuple[int, ...]]:
    """(input width, outputs of the parts) from ``4096x4096+1024+1024``."""
    width, _, parts = text.partition("x")
    return int(width), tuple(map(int, parts.split("+")))


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
    parser.add_argument(
        "--fused", type=fused_of, nargs="*", help="layers of several parts",
        default=[fused_of("4096x4096+1024+1024"), fused_of("4096x14336+14336"), fused_of("8192x28672+28672")],
    )  # fmt: skip
    parser.add_argument("--fused-rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 96, 128, 256, 512])
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
    for width, parts in arguments.fused:
        bench.time_fused(width, parts)
    bench.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
