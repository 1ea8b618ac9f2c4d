"""The GPU linear for many tokens: is it right, how fast is it, which tile suits, where are cliffs.

    python benchmarks/gpu_prefill.py --check                    against float64
    python benchmarks/gpu_prefill.py --time --out FILE          whole linears as dispatched, and cuBLAS bf16
    python benchmarks/gpu_prefill.py --tiles --out FILE         every tile of the prefill kernel, and the wide kernel
    python benchmarks/gpu_prefill.py --reconstruct --out FILE   dense weights decoded before cuBLAS
    python benchmarks/gpu_prefill.py --cliffs --out FILE        neighbouring numbers of tokens

The latter three are measured for the first K and codebook only. Nothing is timed where a check fails.
A timing is one whole linear (transform, GEMM, Hadamards, svh, cast) inside a replayed CUDA graph that goes round over
more weight copies than the L2 holds; the median of several replays, which take turns with those of cuBLAS: what the
GPU's clock does, it does to both. Inputs are random, never zeros.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from gpu_linear_checks import Checks, shape_of
from gpu_prefill_bench import SHAPES, CublasBench, tflops
from gpu_prefill_checks import check_all
from gpu_prefill_cliffs import cliffs, counts_around, used

from vllm_exl3.cuda import dispatch, linear, prefill, reconstruct
from vllm_exl3.cuda.geometry import Form
from vllm_exl3.cuda.prefill_plan import TILES
from vllm_exl3.cuda.timing import Rotation, replayed_in_turns
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import need_gpus

_FEW = 512
"""Tokens up to which a linear is short."""

LOOP_TFLOPS = 927.0
"""What a loop of products with mul1 decoding reached without loads on an H200 (docs/kernels-gpu.md)."""


def check(seed: int) -> bool:
    """All checks on fresh random inputs; prints the worst errors and every failure."""
    checks = Checks()
    check_all(checks, seed)
    return checks.report(seed)


class PrefillBench(CublasBench):
    """Times linears, and what cuBLAS takes for the same shape.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        first, others = arguments.bits[:1], arguments.bits[1:]
        self.kinds = [
            (bits, codebook) for group in (first, others) for codebook in arguments.codebooks for bits in group
        ]
        shards = [
            Shard(round(2 * bits), codebook, *shape, 0, shape[1])
            for bits, codebook in self.kinds
            for shape in arguments.shapes
        ]
        wanted = [i for shard in shards for rows in arguments.rows for i in used(shard, rows, self.limits)[1]]
        for shard in shards[: len(arguments.shapes)]:
            if arguments.tiles:
                wanted += prefill.instances((shard,), self.limits)
            if arguments.cliffs or arguments.tiles:
                wanted += [i for rows in range(1, 129) for i in used(shard, rows, self.limits)[1]]
        self.prepare(wanted)

    def add(self, kernel: str, rotation: Rotation, rows: int, mode: str, call: Callable[[int], object]) -> None:
        """Time one way to compute a cell, in turns with cuBLAS."""
        shard = rotation.shard
        shape = (shard.in_features, shard.out_features)
        calls = {"it": (call, rotation.copies), "bf16": self.dense(shape, rows)}
        times = replayed_in_turns(calls, self.arguments.repeats)
        us, bf16 = times["it"], times["bf16"]
        self.keep(kernel, rotation, rows, mode, us, LOOP_TFLOPS, bf16_us=round(bf16, 2))
        self.note_bf16(shape, rows, bf16)
        cell = (
            f"{shape[0]:5d}×{shape[1]:<5d} {Codebook(shard.codebook).label:5s} K={shard.half_bits / 2:<3g} M={rows:<5d}"
        )
        print(
            f"{cell} {kernel:11s} {mode:12s} {us:8.1f} µs {tflops(shape, rows, us):4.0f} TF bf16/it {bf16 / us:5.2f}",
            flush=True,
        )


def _input(rotation: Rotation, rows: int) -> torch.Tensor:
    return torch.randn(rows, rotation.shard.in_features, device="cuda", dtype=torch.float16)


def time_dispatched(bench: PrefillBench, cells: Iterable[tuple[Rotation, int]]) -> None:
    """Whole linears as they are served."""
    for rotation, rows in cells:
        x = _input(rotation, rows)
        mode, _ = used(rotation.shard, rows, bench.limits)
        bench.add("native", rotation, rows, mode, lambda i: rotation_linear(rotation, x, i))  # noqa: B023


def rotation_linear(rotation: Rotation, x: torch.Tensor, index: int, form: Form | None = None) -> torch.Tensor:
    """One linear with the weights' copy ``index``."""
    return linear.linear(x, rotation.trellis[index], rotation.suh, rotation.svh, None, rotation.layout, form=form)


def time_tiles(bench: PrefillBench, cells: Iterable[tuple[Rotation, int]]) -> None:
    """Every tile of the prefill kernel that may suit, and the kernel for fewer tokens: what the hand-over rests on."""
    for rotation, rows in cells:
        x, shard = _input(rotation, rows), rotation.shard
        out = x.new_empty((rows, shard.out_features))
        for tokens in TILES:
            if tokens >= 2 * max(rows, 64) or (rows > 512 and tokens < 128):
                continue

            def call(i: int) -> None:
                weights = rotation.trellis[i], rotation.suh, rotation.svh  # noqa: B023
                prefill.prefill(x, *weights, None, (shard,), out, tokens=tokens)  # noqa: B023

            bench.add("prefill", rotation, rows, f"prefill{tokens}", call)
        form = dispatch.choose_form(frozenset({shard.codebook}), min(rows, 128), "sm_90a")
        bench.add("wide", rotation, rows, form.name, lambda i: rotation_linear(rotation, x, i, form))  # noqa: B023


def time_reconstruct(bench: PrefillBench, cells: Iterable[tuple[Rotation, int]]) -> None:
    """Dense weights decoded to bounded scratch, then cuBLAS, in float16."""
    for rotation, rows in cells:
        x = _input(rotation, rows)

        def call(i: int) -> torch.Tensor:
            return reconstruct.linear(x, rotation.trellis[i], rotation.suh, rotation.svh, None, rotation.layout)  # noqa: B023

        bench.add("reconstruct", rotation, rows, "", call)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("check", "time", "tiles", "reconstruct", "cliffs"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop timing after this long")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=list(SHAPES))
    parser.add_argument("--bits", type=float, nargs="*", default=[2, 3, 4, 6])
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--codebooks", type=int, nargs="*", default=[2, 1, 0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "little")
    good = check(seed) if arguments.check else True
    if not good or not (arguments.time or arguments.tiles or arguments.reconstruct or arguments.cliffs):
        return 0 if good else 1
    bench = PrefillBench(arguments)
    first, rest = bench.kinds[:1], bench.kinds[1:]
    # Long products pull the clock down for a while: cells of few tokens come before all of them.
    few, many = ([rows for rows in arguments.rows if (rows <= _FEW) == low] for low in (True, False))
    if arguments.time:
        time_dispatched(bench, bench.cells(first, few))
        time_dispatched(bench, bench.cells(rest, few))
    if arguments.tiles:
        time_tiles(bench, bench.cells(first, [rows for rows in arguments.rows if rows <= 1024]))
    if arguments.time:
        time_dispatched(bench, bench.cells(first, many))
    if arguments.reconstruct:
        time_reconstruct(bench, bench.cells(first, [rows for rows in arguments.rows if 256 <= rows <= 4096]))
    if arguments.cliffs:
        for shape in arguments.shapes:
            shard = Shard(round(2 * first[0][0]), first[0][1], *shape, 0, shape[1])
            counts = [rows for rows in counts_around(shard, bench.limits) if rows not in arguments.rows]
            time_dispatched(bench, bench.cells(first, counts, [shape]))
    if arguments.time:
        time_dispatched(bench, bench.cells(rest, many))
    for cliff in cliffs(bench.rows, bench.limits):
        print("cliff", cliff)
    bench.save()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
