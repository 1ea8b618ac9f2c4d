"""The GPU linear: is it right, how fast is it, and where do its kernels' crossovers lie.

    python benchmarks/gpu_linear.py --check                     against float64, every K, codebook and form
    python benchmarks/gpu_linear.py --time --out FILE           whole linears against cuBLAS bf16 (and exllamav3)
    python benchmarks/gpu_linear.py --tune --out FILE           every form at every batch size

A timing is one whole linear (transform, GEMM, Hadamards, svh, cast) inside a replayed CUDA graph that goes round over
more weight copies than the L2 holds; the median of several replays.
"""

import argparse
import datetime
import importlib.util
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from vllm_exl3.cuda import dispatch, linear, runtime
from vllm_exl3.cuda.geometry import Form
from vllm_exl3.cuda.plan import plan_linear
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import Codebook

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))
HALF_BITS = (*range(2, 17, 2), 3, 5, 7)
FORMS = (Form(True, 4), Form(True, 8), Form(False, 8), Form(False, 16))
WIDE = (Form(False, 32), Form(False, 64), Form(False, 128))
BANDWIDTH = 4.4e12
"""Read bandwidth of an H200 in bytes a second, measured (docs/kernels.md)."""

WEIGHTS_PER_SECOND = 9.8e12
"""Issue bound of about three instructions a weight on an H200."""


def weights(shard: Shard, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random trellis bits, which are a valid pack, and real-valued channel scales of both signs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    trellis = torch.randint(
        -(2**15), 2**15, (shard.trellis_words,), generator=generator, device="cuda", dtype=torch.int16
    )

    def scale(size: int) -> torch.Tensor:
        sign = torch.randint(0, 2, (size,), generator=generator, device="cuda") * 2 - 1
        return (sign * (0.5 + torch.rand(size, generator=generator, device="cuda"))).half()

    return trellis, scale(shard.in_features), scale(shard.out_features)


def exact(x: torch.Tensor, shard: Shard, trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> torch.Tensor:
    """The linear in float64 from the decoded weights."""
    wide = torch.zeros((x.shape[0], shard.in_features), dtype=torch.float64, device=x.device)
    wide[:, : x.shape[1]] = x
    dense = decode(trellis.view(shard.trellis_shape), shard.half_bits, shard.codebook).double()
    y = hadamard(hadamard(wide * suh.double()) @ dense) * svh.double()
    return y[:, shard.crop_start : shard.crop_start + shard.crop_size]


def forms() -> tuple[Form, ...]:
    """Every form that this GPU runs."""
    return FORMS + (WIDE if runtime.device(torch.cuda.current_device()).limits.warpgroups else ())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected value; infinite when anything is NaN."""
    error = ((found.double() - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


class Checks:
    """Counts comparisons and remembers the failures."""

    def __init__(self) -> None:
        self.done = 0
        self.failed: list[str] = []
        self.worst: dict[str, float] = {}

    def compare(self, name: str, group: str, found: torch.Tensor, expected: torch.Tensor, limit: float = 5e-4) -> None:
        """Hold a result against float64."""
        error = relative(found, expected)
        self.done += 1
        self.worst[group] = max(self.worst.get(group, 0.0), error)
        if not error <= limit:
            self.failed.append(f"{name}: relative error {error:.3g}, at most {limit:.1g} expected")

    def same(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Hold a result against another one, bit for bit."""
        self.done += 1
        if not torch.equal(found, expected):
            count = (found != expected).sum().item()
            self.failed.append(f"{name}: {count} of {found.numel()} values differ")


def prepare(layers: Iterable[list[Shard]], forms: Iterable[Form]) -> None:
    """Compile, in parallel, what these layers need in these forms."""
    device = runtime.device(torch.cuda.current_device())
    wanted = []
    for shards in layers:
        wanted += [linear.dequantize_instance(shard) for shard in shards]
        wanted += [
            plan_linear(tuple(shards), 1, 128, form, device.limits, planes).instance
            for form in forms
            for planes in (False, True)
        ]
    started = time.perf_counter()
    device.prepare(wanted)
    print(f"{len(set(wanted))} kernels ready after {time.perf_counter() - started:.1f} s", flush=True)


def check_every_kind(checks: Checks, seed: int) -> None:
    """Every K, codebook and form on an odd number of strips, for batch sizes around every tile size."""
    kinds = [(h, c) for c in Codebook for h in HALF_BITS if h % 2 == 0 or c == Codebook.MUL1]
    prepare([[Shard(half_bits, codebook, 1024, 896, 0, 896)] for half_bits, codebook in kinds], forms())
    for half_bits, codebook in kinds:
        shard = Shard(half_bits, codebook, 1024, 896, 0, 896)
        tensors = weights(shard, seed + half_bits)
        x = torch.randn(37, 1024, device="cuda")
        expected, layout = exact(x, shard, *tensors), pack_shards([shard])
        for form in forms():
            for rows in (1, 17, 37) if form.wide else (1, 2, 3, 4, 5, 8, 11, 16, 37):
                found = linear.linear(x[:rows], *tensors, None, layout, form=form, planes=False)
                name = f"{codebook.label} K={half_bits / 2} {form.name} M={rows}"
                checks.compare(name, form.name + " " + codebook.label, found, expected[:rows])
                rotated_inside = linear.linear(x[:rows], *tensors, None, layout, form=form, planes=True)
                checks.same(name + " planes", rotated_inside, found)
        dense = linear.dequantize(*tensors, pack_shards([shard]), True, torch.float16)
        checks.same(f"dequantize rotated {codebook.label} K={half_bits / 2}", dense,
                        decode(tensors[0].view(shard.trellis_shape), half_bits, codebook))  # fmt: skip
        dense = linear.dequantize(*tensors, pack_shards([shard]), False, torch.float32)
        checks.compare(
            f"dequantize {codebook.label} K={half_bits / 2}", "dequantize", x.double() @ dense.double(), expected
        )


def check_layers(checks: Checks, seed: int) -> None:
    """Fused layers of mixed kinds, crops, narrow and strided inputs, dtypes, bias, magnitudes, determinism."""
    mixed = [
        Shard(8, Codebook.MUL1, 2176, 1024, 0, 1024),
        Shard(10, Codebook.MUL1, 2176, 256, 0, 192),
        Shard(5, Codebook.MUL1, 2176, 384, 64, 250),
        Shard(6, Codebook.MCG, 2176, 128, 0, 128),
    ]
    prepare([mixed[:3], mixed], forms())
    for name, shards in (("mul1 mix", mixed[:3]), ("codebook mix", mixed)):
        parts = [weights(shard, seed + index) for index, shard in enumerate(shards)]
        tensors = [torch.cat(column) for column in zip(*parts, strict=True)]
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = torch.randn(21, 2 * 2100, device="cuda").to(dtype)[:, :2100]
            bias = torch.randn(sum(shard.crop_size for shard in shards), device="cuda").to(dtype)
            expected = (
                torch.cat([exact(x, shard, *part) for shard, part in zip(shards, parts, strict=True)], dim=1) + bias
            )
            limit = {torch.float16: 6e-4, torch.bfloat16: 3e-3, torch.float32: 5e-4}[dtype]
            for form in forms():
                for rows in (1, 4, 21):
                    found = linear.linear(x[:rows], *tensors, bias, pack_shards(shards), form=form)
                    checks.compare(f"{name} {dtype} {form.name} M={rows}", name, found, expected[:rows], limit)
                    other = linear.linear(x[:rows], *tensors, bias, pack_shards(shards), form=form, planes=False)
                    checks.same(f"{name} {dtype} {form.name} M={rows} planes", found, other)
                whole = linear.linear(x, *tensors, bias, pack_shards(shards), form=form)
                again = linear.linear(x, *tensors, bias, pack_shards(shards), form=form)
                alone = torch.cat(
                    [linear.linear(x[i : i + 1], *tensors, bias, pack_shards(shards), form=form) for i in range(21)]
                )
                checks.same(f"{name} {dtype} {form.name} twice", whole, again)
                if form.tile_rows not in (8,):
                    checks.same(f"{name} {dtype} {form.name} alone", whole, alone)
    for shard in (Shard(4, Codebook.MUL1, 4096, 28672, 0, 28672), Shard(8, Codebook.MCG, 3968, 16384, 0, 16384)):
        tensors, layout = weights(shard, seed), pack_shards([shard])
        x = torch.randn(17, shard.in_features, device="cuda")
        expected = exact(x, shard, *tensors)
        for form in forms():
            for rows in (1, 3, 8, 17):
                found = linear.linear(x[:rows], *tensors, None, layout, form=form)
                checks.compare(f"large {form.name} M={rows}", "large", found, expected[:rows])
                other = linear.linear(x[:rows], *tensors, None, layout, form=form, planes=False)
                checks.same(f"large {form.name} M={rows} planes", found, other)
    shard = Shard(6, Codebook.MUL1, 14336, 512, 0, 512)
    tensors = weights(shard, seed)
    for magnitude in (1e-20, 1e-3, 1.0, 1e4, 1e20):
        x = torch.randn(8, 14336, device="cuda") * magnitude
        x[0, 17] = 3000 * magnitude
        expected = exact(x, shard, *tensors)
        for form in forms():
            found = linear.linear(x, *tensors, None, pack_shards([shard]), form=form)
            for row in range(8):
                checks.compare(
                    f"magnitude {magnitude} {form.name} row {row}", "magnitude", found[row], expected[row], 7e-4
                )
    x = torch.randn(3, 14336, device="cuda")
    x[1] = 0
    x[2, 5] = math.nan
    for form in forms():
        found = linear.linear(x, *tensors, None, pack_shards([shard]), form=form)
        checks.done += 1
        if not (found[1] == 0).all() or not found[2].isnan().all() or found[0].isnan().any():
            checks.failed.append(f"{form.name}: zero and NaN rows came out wrong")


def check_streams_and_graphs(checks: Checks, seed: int) -> None:
    """Chains of dependent linears: eager, on two streams at once, and replayed, must give the same bits."""
    shard = Shard(8, Codebook.MUL1, 4096, 4096, 0, 4096)
    tensors, layout = weights(shard, seed), pack_shards([shard])
    for rows in (1, 4, 7, 16):
        x = torch.randn(rows, 4096, device="cuda")

        def chain(y: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                y = linear.linear(y, *tensors, None, layout)
                y = y / y.norm(dim=-1, keepdim=True) * 64
                for _ in range(3):
                    y = linear.linear(y, *tensors, None, layout) * (1 / 64)
            return y

        expected = chain(x)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        results = []
        for _ in range(3):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(chain(x))
        torch.cuda.synchronize()
        for result in results:
            checks.same(f"streams M={rows}", result, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(x)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            checks.same(f"graph M={rows}", captured, expected)


def check(seed: int) -> bool:
    """All checks on fresh random inputs; prints the worst errors and every failure."""
    torch.manual_seed(seed)
    checks = Checks()
    check_every_kind(checks, seed)
    check_layers(checks, seed)
    check_streams_and_graphs(checks, seed)
    for group, error in sorted(checks.worst.items()):
        print(f"  {group:24s} worst relative error {error:.2e}")
    for failure in checks.failed[:40]:
        print("FAILED", failure)
    print(f"{checks.done} checks, {len(checks.failed)} failed, seed {seed}")
    return not checks.failed


def replayed(call: Callable[[int], object], copies: int, repeats: int = 7) -> float:
    """Median microseconds of one call in a graph of ``copies`` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(2):
            call(index % copies)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            call(index)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times = []
    for repeat in range(repeats + 2):
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(events[0].elapsed_time(events[1]) * 1e3 / copies)
    return statistics.median(times)


class Rotation:
    """Weight copies of one shape, cut from one buffer that is larger than the L2 several times over."""

    def __init__(self, shape: tuple[int, int], half_bits: int, codebook: int, buffer: torch.Tensor) -> None:
        self.shard = Shard(half_bits, codebook, *shape, 0, shape[1])
        words = self.shard.trellis_words
        self.copies = max(3, min(64, math.ceil(320e6 / (2 * words))))
        step = (buffer.numel() - words) // self.copies // 1024 * 1024
        step = min(step, words)
        self.trellis = [buffer[index * step : index * step + words] for index in range(self.copies)]
        _, self.suh, self.svh = weights(Shard(2, codebook, *shape, 0, shape[1]), 1)
        self.layout = pack_shards([self.shard])

    def time(self, x: torch.Tensor, form: Form | None, planes: bool | None = None) -> float:
        """Microseconds of one linear."""
        return replayed(
            lambda i: linear.linear(
                x, self.trellis[i], self.suh, self.svh, None, self.layout, form=form, planes=planes
            ),
            self.copies,
        )


def limit_us(shape: tuple[int, int], half_bits: int) -> float:
    """The larger of bytes over bandwidth and weights over the issue rate."""
    count = shape[0] * shape[1]
    return 1e6 * max(count * half_bits / 16 / BANDWIDTH, count / WEIGHTS_PER_SECOND)


def cublas(shape: tuple[int, int], rows: int) -> float:
    """Microseconds of torch's bf16 linear."""
    copies = max(3, math.ceil(320e6 / (2 * shape[0] * shape[1])))
    dense = [torch.randn(shape[1], shape[0], device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(rows, shape[0], device="cuda", dtype=torch.bfloat16)
    return replayed(lambda i: torch.nn.functional.linear(x, dense[i]), copies)


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
    buffer = torch.randint(-(2**15), 2**15, (600_000_000,), device="cuda", dtype=torch.int16)
    for shape in arguments.shapes:
        for rows in arguments.rows:
            rows_out.append(
                {"kernel": "cublas_bf16", "in": shape[0], "out": shape[1], "m": rows, "us": cublas(shape, rows)}
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
            used = form or dispatch.choose_form(frozenset({codebook}), rows, runtime.device(0).limits.architecture)
            row = {
                "kernel": "native", "in": shape[0], "out": shape[1], "m": rows, "bits": half_bits / 2,
                "codebook": Codebook(codebook).label, "mode": used.name, "us": us,
                "gbps": shape[0] * shape[1] * half_bits / 16 / us / 1e3, "limit_us": limit_us(shape, half_bits),
            }  # fmt: skip
            rows_out.append(row)
            bf16 = float(str(dense[shape[0], shape[1], rows]))
            print(f"{shape[0]:6d}×{shape[1]:<6d} {row['codebook']:5s} K={half_bits / 2:<4g} M={rows:<4d} {row['mode']:11s} {us:8.2f} µs "
                  f"{shape[0] * shape[1] / us / 1e6:5.2f} Tw/s {row['gbps']:6.0f} GB/s  bf16/ours {bf16 / us:5.2f}", flush=True)  # fmt: skip
    return rows_out


def every_form(codebook: int, rows: int) -> list[Form]:
    """The forms worth timing at a batch size."""
    if rows <= 16:
        narrow = [form for form in FORMS if rows <= 2 * form.tile_rows and (rows > 4 or form.tile_rows < 16)]
        return [*narrow, WIDE[0]] if rows > 8 else narrow
    return [form for form in WIDE if form.tile_rows < 2 * rows and rows <= form.tile_rows]


def meta() -> dict[str, object]:
    """What the numbers were measured on."""
    properties = torch.cuda.get_device_properties(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "machine": "h200",
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
    }


def _shape(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--shapes", type=_shape, nargs="*", default=list(SHAPES))
    parser.add_argument("--bits", type=float, nargs="*", default=[2, 3, 4, 6])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--codebooks", type=int, nargs="*", default=[2, 1, 0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(__import__("os").urandom(3), "little")
    good = check(seed) if arguments.check else True
    rows: list[dict[str, object]] = []
    print(runtime.device(torch.cuda.current_device()).limits)
    if arguments.tune:
        rows += measure(arguments, every_form)
    if arguments.time:
        rows += measure(arguments, lambda codebook, count: [None])
    if arguments.out and rows:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"meta": meta(), "rows": rows}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    assert importlib.util.find_spec("cuda.bindings"), "cuda-bindings is missing"
    sys.exit(main())
