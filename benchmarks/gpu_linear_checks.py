"""The GPU linear against float64: every kind and form, fused layers, dtypes, magnitudes, streams and graphs.

Used by ``gpu_linear.py --check`` and by the tests in ``tests/gpu``.
"""

import math
import random
import time
from collections.abc import Iterable, Sequence

import torch

from vllm_exl3.cuda import dequantize, linear, runtime
from vllm_exl3.cuda.geometry import Form
from vllm_exl3.cuda.narrow import NARROW_32
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import Codebook

HALF_BITS = (*range(2, 17, 2), 3, 5, 7)
FORMS = (Form(True, 4), Form(True, 8), Form(False, 8), Form(False, 16))
FAST = Form(True, 8, fast=True)
WIDE = (NARROW_32, Form(False, 32), Form(False, 64), Form(False, 128))
"""What Hopper has besides."""


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

    def report(self, seed: int) -> bool:
        """Print the worst errors and the failures; returns whether there were none."""
        for group, error in sorted(self.worst.items()):
            print(f"  {group:24s} worst relative error {error:.2e}")
        for failure in self.failed[:40]:
            print("FAILED", failure)
        print(f"{self.done} checks, {len(self.failed)} failed, seed {seed}", flush=True)
        return not self.failed


def shape_of(text: str) -> tuple[int, int]:
    """``4096x14336``, as command lines give a layer's inputs and outputs."""
    width, _, height = text.partition("x")
    return int(width), int(height)


def prepare(layers: Iterable[list[Shard]], forms: Iterable[Form]) -> None:
    """Compile, in parallel, what these layers need in these forms."""
    device = runtime.device(torch.cuda.current_device())
    wanted = []
    for shards in layers:
        wanted += [dequantize.dequantize_instance(shard) for shard in shards]
        wanted += [
            i
            for form in forms
            for i in linear.plan(tuple(shards), form.tile_rows, 128, form, device.limits, rotated=True).instances
        ]
    started = time.perf_counter()
    device.prepare(wanted)
    print(f"{len(set(wanted))} kernels ready after {time.perf_counter() - started:.1f} s", flush=True)


KINDS = tuple((h, c) for c in Codebook for h in HALF_BITS if h % 2 == 0 or c == Codebook.MUL1)
"""(2·K, codebook) of every trellis that the format has."""


def sample_of_kinds(seed: int, each: int = 2) -> list[tuple[int, Codebook]]:
    """Some K of every codebook, and one that is no whole number: other ones for every seed."""
    chooser = random.Random(seed)  # noqa: S311  not for secrets
    whole = [[kind for kind in KINDS if kind[1] == codebook and kind[0] % 2 == 0] for codebook in Codebook]
    sampled = [kind for kinds in whole for kind in chooser.sample(kinds, each)]
    return [*sampled, chooser.choice([kind for kind in KINDS if kind[0] % 2])]


def check_kinds(checks: Checks, seed: int) -> None:
    """`check_every_kind` of a sample."""
    check_every_kind(checks, seed, sample_of_kinds(seed))


def check_every_kind(checks: Checks, seed: int, kinds: Sequence[tuple[int, Codebook]] = KINDS) -> None:
    """Every K, codebook and form on an odd number of n tiles, for batch sizes around every tile size."""
    prepare([[Shard(half_bits, codebook, 1024, 896, 0, 896)] for half_bits, codebook in kinds], forms())
    for half_bits, codebook in kinds:
        shard = Shard(half_bits, codebook, 1024, 896, 0, 896)
        tensors = random_weights(shard, seed + half_bits)
        x = torch.randn(37, 1024, device="cuda")
        expected, layout = exact(x, shard, *tensors), pack_shards([shard])
        for form in forms():
            for rows in (1, 17, 37) if form.wide else (1, 2, 3, 4, 5, 8, 11, 16, 27, 37):
                found = linear.linear(x[:rows], *tensors, None, layout, form=form)
                name = f"{codebook.label} K={half_bits / 2} {form.name} M={rows}"
                checks.compare(name, form.name + " " + codebook.label, found, expected[:rows])
                if not form.wide:
                    other = linear.linear(x[:rows], *tensors, None, layout, form=form, rotated=True)
                    checks.same(name + " rotated before", other, found)
        dense = dequantize.dequantize(*tensors, pack_shards([shard]), True, torch.float16)
        checks.same(f"dequantize rotated {codebook.label} K={half_bits / 2}", dense,
                        decode(tensors[0].view(shard.trellis_shape), half_bits, codebook))  # fmt: skip
        dense = dequantize.dequantize(*tensors, pack_shards([shard]), False, torch.float32)
        checks.compare(
            f"dequantize {codebook.label} K={half_bits / 2}", "dequantize", x.double() @ dense.double(), expected
        )


def check_scratch(checks: Checks, seed: int) -> None:
    """Several tiles of tokens in memory that was used: neither counters nor sums may begin with what was there.

    Ones in every bit are what a missing sum looks like, ones in every word say that others finish a strip.
    """
    shard, limits = Shard(8, Codebook.MUL1, 1024, 896, 0, 896), runtime.device(torch.cuda.current_device()).limits
    tensors, layout, x = random_weights(shard, seed), pack_shards([shard]), torch.randn(37, 1024, device="cuda")
    prepare([[shard]], forms())
    expected = exact(x, shard, *tensors)
    for form in forms():
        for rotated in (None,) if form.wide else (False, True):
            size = linear.plan((shard,), 37, 1024, form, limits, rotated=rotated).scratch
            for word in (-1, 1):
                used = [torch.full((size // 4,), word, dtype=torch.int32, device="cuda") for _ in range(4)]
                del used
                found = linear.linear(x, *tensors, None, layout, form=form, rotated=rotated)
                checks.compare(f"used scratch {word} {form.name} rotated {rotated}", "scratch", found, expected)


def check_fast(checks: Checks, seed: int) -> None:
    """Activations of one int8: their error, and the same bits wherever the input is rotated and for a row alone."""
    for half_bits, shape in ((8, (4096, 4096)), (5, (2176, 896)), (6, (4096, 14336)), (4, (8192, 28672))):
        shard = Shard(half_bits, Codebook.MUL1, *shape, 0, shape[1])
        prepare([[shard]], (FAST,))
        tensors, layout = random_weights(shard, seed), pack_shards([shard])
        x = torch.randn(11, shape[0], device="cuda", dtype=torch.float16)
        expected = exact(x, shard, *tensors)
        for rows in (5, 8, 11):
            found = linear.linear(x[:rows], *tensors, None, layout, form=FAST)
            checks.compare(f"fast {shape} M={rows}", "fast", found, expected[:rows], 1.2e-2)
            other = linear.linear(x[:rows], *tensors, None, layout, form=FAST, rotated=True)
            checks.same(f"fast {shape} M={rows} rotated before", other, found)
            alone = linear.linear(x[rows - 1 : rows], *tensors, None, layout, form=FAST)
            checks.same(f"fast {shape} M={rows} alone", alone, found[rows - 1 :])


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
        parts = [random_weights(shard, seed + index) for index, shard in enumerate(shards)]
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
                    other = linear.linear(x[:rows], *tensors, bias, pack_shards(shards), form=form, rotated=True)
                    checks.same(f"{name} {dtype} {form.name} M={rows} rotated before", other, found)
                whole = linear.linear(x, *tensors, bias, pack_shards(shards), form=form)
                again = linear.linear(x, *tensors, bias, pack_shards(shards), form=form)
                alone = torch.cat(
                    [linear.linear(x[i : i + 1], *tensors, bias, pack_shards(shards), form=form) for i in range(21)]
                )
                checks.same(f"{name} {dtype} {form.name} twice", whole, again)
                checks.same(f"{name} {dtype} {form.name} alone", whole, alone)


def check_large(checks: Checks, seed: int) -> None:
    """Shapes whose k blocks are not cut at the ends of n tiles, and batches of more than one tile."""
    for shard in (Shard(4, Codebook.MUL1, 4096, 28672, 0, 28672), Shard(8, Codebook.MCG, 3968, 16384, 0, 16384)):
        tensors, layout = random_weights(shard, seed), pack_shards([shard])
        x = torch.randn(17, shard.in_features, device="cuda")
        expected = exact(x, shard, *tensors)
        for form in forms():
            for rows in (1, 3, 8, 17):
                found = linear.linear(x[:rows], *tensors, None, layout, form=form)
                checks.compare(f"large {form.name} M={rows}", "large", found, expected[:rows])


def check_magnitudes(checks: Checks, seed: int) -> None:
    """Inputs of any magnitude, with outliers; rows of zeros, NaNs, which stay in their row, and what overflows."""
    shard = Shard(6, Codebook.MUL1, 14336, 512, 0, 512)
    tensors = random_weights(shard, seed)
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
    x = torch.randn(4, 14336, device="cuda")
    x[1] = 0
    x[2, 5] = math.nan
    largest = int(tensors[1].abs().argmax())
    x[3, largest] = 3.2e38 / tensors[1][largest].float()
    for form in forms():
        found = linear.linear(x, *tensors, None, pack_shards([shard]), form=form)
        checks.done += 1
        if not (found[1] == 0).all() or not found[2].isnan().all() or found[0].isnan().any():
            checks.failed.append(f"{form.name}: zero and NaN rows came out wrong")
        if (found[3].abs() < 1e30).any():
            checks.failed.append(f"{form.name}: a row of the largest numbers came out as something plausible")


def check_streams_and_graphs(checks: Checks, seed: int) -> None:
    """Chains of dependent linears: eager, on two streams at once, and replayed, must give the same bits.

    At numbers of tokens that the dispatch table gives to every kernel.
    """
    shard = Shard(8, Codebook.MUL1, 4096, 4096, 0, 4096)
    tensors, layout = random_weights(shard, seed), pack_shards([shard])
    for rows in (1, 4, 7, 16, 24, 40):
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


def check_all(checks: Checks, seed: int) -> None:
    """Everything, on inputs of this seed."""
    torch.manual_seed(seed)
    for check in (
        check_every_kind,
        check_scratch,
        check_fast,
        check_layers,
        check_large,
        check_magnitudes,
        check_streams_and_graphs,
    ):
        check(checks, seed)
