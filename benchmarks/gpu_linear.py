"""The GPU linear: is it right, how fast is it, and where do its kernels' crossovers lie.

    python benchmarks/gpu_linear.py --check                     against float64, every K, codebook and form
    python benchmarks/gpu_linear.py --time --out FILE           whole linears against cuBLAS bf16 (and exllamav3)
    python benchmarks/gpu_linear.py --tune --out FILE           every form at every batch size
    python benchmarks/gpu_linear.py --peer --out FILE           exllamav3 on the same cells, where it is installed
                                                                (EXL3_INT8_GEMV=0 in the environment: its fp16 mode)

A timing is one whole linear (transform, GEMM, Hadamards, svh, cast) inside a replayed CUDA graph that goes round over
more weight copies than the L2 holds; the median of several replays.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from gpu_linear_checks import FORMS, WIDE, Checks, check_all, shape_of

from vllm_exl3.cuda import gemm, linear, prefill, runtime
from vllm_exl3.cuda.geometry import Form
from vllm_exl3.cuda.timing import Rotation, cublas_us, limit_us, random_trellis, replayed
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import need_gpus, write_results

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))


def check(seed: int) -> bool:
    """All checks on fresh random inputs; prints the worst errors and every failure."""
    torch.manual_seed(seed)
    checks = Checks()
    check_all(checks, seed)
    return checks.report(seed)


def cells(arguments: argparse.Namespace) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """(shape, codebook, half_bits, rows) of every cell asked for."""
    for shape in arguments.shapes:
        for codebook in arguments.codebooks:
            for bits in arguments.bits:
                for rows in arguments.rows:
                    yield shape, codebook, round(2 * bits), rows


def measure(
    arguments: argparse.Namespace, forms: Callable[[int, int], Iterable[Form | None]]
) -> list[dict[str, object]]:
    """One row per cell and form, and the bf16 cuBLAS rows of the same shapes."""
    rows_out: list[dict[str, object]] = []
    buffer = random_trellis(600_000_000)
    layers = {
        (tuple(pack_shards([Shard(half_bits, codebook, *shape, 0, shape[1])])), shape[0])
        for shape, codebook, half_bits, _ in cells(arguments)
    }
    linear.prepare(layers, torch.device("cuda", torch.cuda.current_device()))
    for shape in arguments.shapes:
        for rows in arguments.rows:
            rows_out.append(
                {"kernel": "cublas_bf16", "in": shape[0], "out": shape[1], "m": rows, "us": cublas_us(shape, rows)}
            )
    dense = {(row["in"], row["out"], row["m"]): row["us"] for row in rows_out}
    kept: dict[tuple[object, ...], Rotation] = {}
    for shape, codebook, half_bits, rows in cells(arguments):
        key = (shape, codebook, half_bits)
        if key not in kept:
            kept = {key: Rotation(shape, half_bits, codebook, buffer)}
        x = torch.randn(rows, shape[0], device="cuda", dtype=torch.float16)
        for form in forms(codebook, rows):
            us = kept[key].time(x, form)
            mode = form.name if form else served_by(kept[key], rows)
            row = _row("native", shape, codebook, half_bits, rows, mode, us)
            rows_out.append(row)
            bf16 = float(str(dense[shape[0], shape[1], rows]))
            name = f"{shape[0]:6d}×{shape[1]:<6d} {row['codebook']:5s} K={half_bits / 2:<4g} M={rows:<4d} {mode:11s}"
            rate = f"{shape[0] * shape[1] / us / 1e6:5.2f} Tw/s {row['gbps']:6.0f} GB/s"
            print(f"{name} {us:8.2f} µs {rate}  bf16/ours {bf16 / us:5.2f}", flush=True)
    return rows_out


def served_by(rotation: Rotation, rows: int) -> str:
    """The kernel that serves a batch size."""
    limits, shard = runtime.device(0).limits, rotation.shard
    if gemm.choose((shard,), rows, limits) is not None:
        return "gemm"
    if prefill.serves((shard,), rows, limits):
        return "prefill"
    return linear.choose_form((shard,), rows, limits).name


def measure_peer(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One row per cell for exllamav3's own linear, in the mode that its environment variable selects."""
    from exllamav3.modules.quant.exl3 import LinearEXL3

    kernel = "exllamav3_fp16" if os.environ.get("EXL3_INT8_GEMV") == "0" else "exllamav3"
    buffer = random_trellis(600_000_000)
    markers = {Codebook.MUL1: {"mul1": torch.tensor(-2082680531)}, Codebook.MCG: {"mcg": torch.tensor(-877912083)}}
    rows_out: list[dict[str, object]] = []
    started = time.perf_counter()
    for shape, codebook, half_bits, rows in cells(arguments):
        if time.perf_counter() - started > arguments.seconds:
            print("out of time")
            break
        copies = Rotation(shape, half_bits, codebook, buffer)
        marker = {key: value.to(torch.int32).cuda() for key, value in markers.get(Codebook(codebook), {}).items()}
        layers = [
            LinearEXL3(
                None, *shape, suh=copies.suh, svh=copies.svh, trellis=trellis.view(copies.shard.trellis_shape), **marker
            )
            for trellis in copies.trellis
        ]
        x = torch.randn(rows, shape[0], device="cuda", dtype=torch.float16)
        with torch.inference_mode():
            for index in range(3):  # it tunes itself at the first calls
                layers[index].forward(x, {})
            us = replayed(lambda i: layers[i].forward(x, {}), copies.copies)  # noqa: B023
        rows_out.append(_row(kernel, shape, codebook, half_bits, rows, "", us))
        print(f"{kernel} {shape} {Codebook(codebook).label} K={half_bits / 2:g} M={rows} {us:.2f} µs", flush=True)
    return rows_out


def _row(
    kernel: str, shape: tuple[int, int], codebook: int, half_bits: int, rows: int, mode: str, us: float
) -> dict[str, object]:
    return {
        "kernel": kernel, "in": shape[0], "out": shape[1], "m": rows, "bits": half_bits / 2,
        "codebook": Codebook(codebook).label, "mode": mode, "us": round(us, 3),
        "gbps": round(shape[0] * shape[1] * half_bits / 16 / us / 1e3, 1),
        "limit_us": round(limit_us(shape, half_bits, codebook, rows), 3),
    }  # fmt: skip


def _cell(row: dict[str, object]) -> tuple[object, ...]:
    """What a row measures."""
    names = ("kernel", "in", "out", "m", "bits", "codebook")
    return tuple(row.get(name) for name in names)


def every_form(codebook: int, rows: int) -> list[Form]:
    """The forms worth timing at a batch size."""
    if rows <= 16:
        narrow = [form for form in FORMS if rows <= 2 * form.tile_rows and (rows > 4 or form.tile_rows < 16)]
        return [*narrow, *WIDE[:2]] if rows > 8 else narrow
    return [form for form in WIDE if form.tile_rows < 2 * rows and rows <= form.tile_rows]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop measuring the peer after this long")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=list(SHAPES))
    parser.add_argument("--bits", type=float, nargs="*", default=[2, 3, 4, 6])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--codebooks", type=int, nargs="*", default=[2, 1, 0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "little")
    good = check(seed) if arguments.check else True
    rows: list[dict[str, object]] = []
    print(runtime.device(torch.cuda.current_device()).limits)
    if arguments.tune:
        rows += measure(arguments, every_form)
    if arguments.time:
        rows += measure(arguments, lambda codebook, count: [None])
    if arguments.peer:
        rows += measure_peer(arguments)
    if arguments.out and rows:
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        facts = {"multiprocessors": multiprocessors, "cuda": torch.version.cuda}
        cells_measured = {_cell(row) for row in rows}
        write_results(
            arguments.out,
            rows,
            machine="h200",
            command=f"python benchmarks/gpu_linear.py {'--tune' if arguments.tune else '--time --peer'}",
            facts=facts,
            replaces=lambda row: _cell(row) in cells_measured,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
