"""The GEMM for up to 128 tokens against float64: kinds, tiles, cuts of k, fused layers, spikes, batches, graphs.

With int8 it is held against the same arithmetic in PyTorch.

Used by ``gpu_gemm.py --check`` and by the tests in ``tests/gpu``. Scratch and outputs are poisoned before every launch,
and lie between words that nothing may touch.
"""

import math
import time
from collections.abc import Iterable, Sequence

import torch
from gpu_linear_checks import KINDS, Checks, exact, sample_of_kinds

from vllm_exl3.cuda import gemm, linear, runtime
from vllm_exl3.cuda.binding import bind
from vllm_exl3.cuda.gemm_plan import FEW_TOKENS, GEMM_TILES, INT8_GEMM_TILES, GemmPartition, gemm_instance, plan_gemm
from vllm_exl3.cuda.geometry import round_up
from vllm_exl3.cuda.prefill_arguments import PrefillArgs
from vllm_exl3.cuda.prefill_input import ROTATE_FEW, TRANSFORM
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.int8 import MOST_HALF_BITS, linear_int8
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook

ONE = (8, Codebook.MUL1)

RATES = (
    Shard(8, Codebook.MUL1, 2176, 1024, 0, 1024),
    Shard(10, Codebook.MUL1, 2176, 256, 0, 192),
    Shard(8, Codebook.MUL1, 2176, 384, 64, 250),
    Shard(10, Codebook.MUL1, 2176, 128, 0, 128),
)
CODEBOOKS = (
    Shard(5, Codebook.MUL1, 2176, 384, 0, 384),
    Shard(6, Codebook.MCG, 2176, 640, 100, 500),
    Shard(5, Codebook.MUL1, 2176, 128, 0, 100),
)
BYTES = (
    Shard(8, Codebook.MUL1, 2176, 384, 0, 384),
    Shard(5, Codebook.MUL1, 2176, 640, 100, 500),
    Shard(8, Codebook.MUL1, 2176, 128, 0, 100),
)
BYTE_KINDS = tuple(kind for kind in KINDS if kind[1] == Codebook.MUL1 and kind[0] <= MOST_HALF_BITS)

PARTITIONS = (None, GemmPartition(32, False), GemmPartition(5, False), GemmPartition(8, True), GemmPartition(32, True))
"""Of four n tiles of eight k blocks."""

LIMITS = {torch.float16: 6e-4, torch.bfloat16: 3e-3, torch.float32: 5e-4}
"""Largest relative error allowed, by the output's dtype."""

_GUARD = 256
"""Bytes before and behind scratch that nothing may touch; as many columns of the output."""


def run(
    checks: Checks,
    name: str,
    x: torch.Tensor,
    tensors: Iterable[torch.Tensor],
    bias: torch.Tensor | None,
    shards: Sequence[Shard],
    partition: GemmPartition | None = None,
    *,
    shift: int = 0,
    int8: bool = False,
) -> torch.Tensor:
    """The kernels between guards, which are checked.

    Args:
        checks: where a failure goes.
        name: what it is called there.
        x: ``[M, in]``.
        tensors: trellis, suh and svh, flat.
        bias: ``[columns]`` or None.
        shards: the layer's.
        partition: how to divide the work.
        shift: elements that the output's rows lie beside whole vectors.
        int8: multiply int8.
    """
    device, layout = runtime.device(torch.cuda.current_device()), tuple(shards)
    plan = plan_gemm(layout, x.shape[0], x.shape[1], device.limits, partition, int8=int8)
    columns = sum(shard.crop_size for shard in layout)
    pitch = round_up(columns, 8) + 2 * _GUARD + shift
    around = torch.full((x.shape[0] + 2, pitch), math.nan, dtype=x.dtype, device=x.device)
    out = around[1:-1, _GUARD : _GUARD + columns]
    scratch = torch.full((plan.scratch + 2 * _GUARD,), 0xFF, dtype=torch.uint8, device=x.device)
    arguments = PrefillArgs.from_buffer_copy(plan.arguments)
    trellis, suh, svh = tensors
    bind(arguments, plan.offsets, scratch[_GUARD:-_GUARD], plan.scratch_parts, x, trellis, suh, svh, bias, out)
    stream, dependent = runtime.current_stream(x.device.index), device.limits.dependent_launch
    for instance, grid, threads, shared, cluster in (
        (plan.transform.instance, plan.transform.grid, plan.transform.threads, plan.transform.shared,
         plan.transform.cluster),
        (plan.instance, (plan.grid, 1), plan.threads, plan.shared, plan.cluster),
    ):  # fmt: skip
        kernel = device.kernel(instance)
        kernel.allow_shared(shared)
        kernel.launch(grid, threads, shared, stream, [arguments], dependent, cluster)
    found = out.clone()
    out.fill_(math.nan)
    checks.done += 1
    if not around.isnan().all() or not (scratch[:_GUARD] == 0xFF).all() or not (scratch[-_GUARD:] == 0xFF).all():
        checks.failed.append(f"{name}: wrote beside the output or the scratch")
    return found


def prepare(kinds: Iterable[Sequence[tuple[int, int]]], tiles: Iterable[int], *, int8: bool = False) -> None:
    """Compile, in parallel, the kernels of layers of these kinds."""
    wanted = [gemm_instance(tokens, sorted(set(layer)), int8=int8) for tokens in tiles for layer in kinds]
    started = time.perf_counter()
    runtime.device(torch.cuda.current_device()).prepare([*wanted, TRANSFORM, *ROTATE_FEW.values()])
    print(f"{len(set(wanted))} kernels ready after {time.perf_counter() - started:.1f} s", flush=True)


def kinds_of(shards: Iterable[Shard]) -> list[tuple[int, int]]:
    """(half_bits, codebook) of shards."""
    return [(shard.half_bits, shard.codebook) for shard in shards]


def _tiles(index: int, every: int, int8: bool = False) -> tuple[int, ...]:
    """Tiles of a kind, every n-th of them; kinds take turns."""
    tiles = INT8_GEMM_TILES if int8 else GEMM_TILES
    return tuple(tokens for tile, tokens in enumerate(tiles) if (tile + index) % every == 0)


def prepare_sample(seed: int) -> None:
    """All kernels that the checks of a sample of kinds use, at once."""
    wanted = [gemm_instance(t, [kind]) for i, kind in enumerate(sample_of_kinds(seed), seed) for t in _tiles(i, 12)]
    wanted += [gemm_instance(tokens, [ONE]) for tokens in GEMM_TILES]
    wanted += [
        gemm_instance(t, [kind], int8=True) for i, kind in enumerate(BYTE_KINDS, seed) for t in _tiles(i, 7, True)
    ]
    wanted += [gemm_instance(tokens, [ONE], int8=True) for tokens in (16, 64, 128)]
    for layer, int8 in ((RATES, False), (CODEBOOKS, False), (BYTES, True)):
        wanted += [gemm_instance(tokens, sorted(set(kinds_of(layer))), int8=int8) for tokens in (32, 64)]
    runtime.device(torch.cuda.current_device()).prepare([*wanted, TRANSFORM, *ROTATE_FEW.values()])


def check_kinds(checks: Checks, seed: int) -> None:
    """`check_every_kind` of a sample, with a tile each."""
    check_every_kind(checks, seed, sample_of_kinds(seed), every=12)


def check_every_kind(checks: Checks, seed: int, kinds: Sequence[tuple[int, Codebook]] = KINDS, every: int = 1) -> None:
    """Every K and codebook on an odd number of Hadamard blocks; numbers of tokens at and between tiles; cuts of k."""
    if every == 1:
        prepare([[kind] for kind in kinds], GEMM_TILES)
    for index, (half_bits, codebook) in enumerate(kinds):
        shard = Shard(half_bits, codebook, 1024, 896, 0, 896)  # 4 n tiles of 8 k blocks
        tensors = random_weights(shard, seed + index)
        x = torch.randn(128, 1024, device="cuda")
        expected = exact(x, shard, *tensors)
        for tokens in _tiles(seed + index, every):
            for rows in (tokens, tokens - 3, tokens - 7):
                for partition in PARTITIONS:
                    name = f"K={half_bits / 2} {Codebook(codebook).label} M={rows} {partition}"
                    found = run(checks, name, x[:rows], tensors, None, (shard,), partition)
                    checks.compare(name, f"gemm{tokens}", found, expected[:rows], LIMITS[torch.float32])


def check_int8_kinds(checks: Checks, seed: int) -> None:
    """`check_every_kind_of_int8` with a tile each."""
    check_every_kind_of_int8(checks, seed, every=7)


def check_every_kind_of_int8(checks: Checks, seed: int, every: int = 1) -> None:
    """Products of int8: every K, numbers of tokens at and between tiles, cuts of k; sums of a part are exact."""
    if every == 1:
        prepare([[kind] for kind in BYTE_KINDS], INT8_GEMM_TILES, int8=True)
    for index, kind in enumerate(BYTE_KINDS):
        shard = Shard(*kind, 1024, 896, 0, 896)
        tensors = random_weights(shard, seed + index)
        x = torch.randn(128, 1000, device="cuda")
        expected = linear_int8(x, *tensors, None, tuple(pack_shards([shard])))
        for tokens in _tiles(seed + index, every, True):
            for rows in (tokens, tokens - 3, tokens - 7):
                for partition in PARTITIONS:
                    name = f"int8 K={kind[0] / 2} M={rows} {partition}"
                    found = run(checks, name, x[:rows], tensors, None, (shard,), partition, int8=True)
                    checks.compare(name, f"int8 {tokens}", found, expected[:rows].double(), LIMITS[torch.float32])


def check_cuts(checks: Checks, seed: int) -> None:
    """Two to 32 equal parts of a strip, few and many ranges of the list; a row's bits alone, twice, in every batch."""
    prepare([[ONE]], GEMM_TILES)
    prepare([[ONE]], (16, 64, 128), int8=True)
    shard = Shard(*ONE, 8192, 1024, 0, 1024)  # 4 n tiles of 64 k blocks
    tensors = random_weights(shard, seed)
    x = torch.randn(128, 8192, device="cuda")
    exactly, rounded = exact(x, shard, *tensors), linear_int8(x, *tensors, None, tuple(pack_shards([shard]))).double()
    equal = [GemmPartition(4 * parts, True) for parts in (2, 4, 8, 16, 32)]
    lists = [GemmPartition(blocks, False) for blocks in (1, 3, 5, 77, 131, 132)]
    for partition in (None, *equal, *lists):
        for int8, expected, batches in (
            (False, exactly, (1, 2, 9, 17, 31, 33, 41, 57, 64, 70, 90, 100)),
            (True, rounded, (1, 16, 50, 64)),
        ):
            name = f"int8={int8} {partition}"
            whole = run(checks, name, x, tensors, None, (shard,), partition, int8=int8)
            checks.compare(name, f"cuts int8={int8}", whole, expected, LIMITS[torch.float32])
            checks.same(f"{name} twice", run(checks, name, x, tensors, None, (shard,), partition, int8=int8), whole)
            for rows in batches:
                found = run(checks, f"{name} M={rows}", x[:rows], tensors, None, (shard,), partition, int8=int8)
                checks.same(f"{name} M={rows}", found, whole[:rows])
            alone = run(checks, f"{name} last row", x[127:], tensors, None, (shard,), partition, int8=int8)
            checks.same(f"{name} last row", alone, whole[127:])


def check_batches(checks: Checks, seed: int) -> None:
    """The same bits for a row alone and in every batch on its side of `FEW_TOKENS`, in layers with each kind of cut."""
    prepare([[ONE]], GEMM_TILES)
    for shape in ((4096, 4096), (4096, 14336), (3968, 1152), (4096, 28672)):
        shard = Shard(*ONE, *shape, 0, shape[1])
        tensors = random_weights(shard, seed)
        x = torch.randn(128, shape[0], device="cuda").half()
        most = {rows: run(checks, f"{shape}", x[:rows], tensors, None, (shard,)) for rows in (FEW_TOKENS, 128)}
        checks.compare(f"{shape}", "batches", most[128], exact(x, shard, *tensors), LIMITS[torch.float16])
        checks.compare(f"{shape}", "batches", most[FEW_TOKENS], most[128][:FEW_TOKENS], LIMITS[torch.float16])
        for rows in (*range(1, 65), *range(65, 128, 5)):
            whole = most[FEW_TOKENS if rows <= FEW_TOKENS else 128]
            checks.same(f"{shape} M={rows}", run(checks, f"{shape}", x[:rows], tensors, None, (shard,)), whole[:rows])
        for row in (1, 7, 40, FEW_TOKENS - 1):
            found = run(checks, f"{shape} row {row}", x[row : row + 1], tensors, None, (shard,))
            checks.same(f"{shape} row {row}", found, most[FEW_TOKENS][row : row + 1])


def check_layers(checks: Checks, seed: int) -> None:
    """Fused layers of two rates or codebooks: crops, bias, dtypes, inputs that are narrow, strided or unaligned."""
    prepare([kinds_of(RATES), kinds_of(CODEBOOKS)], (32, 64))
    prepare([kinds_of(BYTES)], (32, 64), int8=True)
    for label, layer in (("rates", RATES), ("codebooks", CODEBOOKS), ("int8", BYTES)):
        int8 = layer is BYTES
        parts = [random_weights(shard, seed + index) for index, shard in enumerate(layer)]
        tensors = [torch.cat(column) for column in zip(*parts, strict=True)]
        n_tiles = sum(-(-shard.out_features // 256) for shard in layer)
        for dtype, limit in LIMITS.items():
            wide = torch.randn(60, 2 * 2100, device="cuda").to(dtype)
            bias = torch.randn(sum(shard.crop_size for shard in layer), device="cuda").to(dtype)
            for first, width, shift in ((0, 2100, 0), (0, 2176, 3), (1, 2099, 1), (4, 2050, 0)):
                x = wide[:, first : first + width]
                if int8:
                    expected = linear_int8(x.float(), *tensors, None, tuple(pack_shards(layer))).double()
                else:
                    each = [exact(x, shard, *part) for shard, part in zip(layer, parts, strict=True)]
                    expected = torch.cat(each, dim=1)
                for partition in (None, GemmPartition(20, False), GemmPartition(17 * n_tiles, True)):
                    for rows, added in ((25, bias), (32, None), (60, bias)):
                        name = f"{label} {dtype} from {first} of {width} M={rows} {partition}"
                        found = run(checks, name, x[:rows], tensors, added, layer, partition, shift=shift, int8=int8)
                        plus = expected[:rows] if added is None else expected[:rows] + added
                        checks.compare(name, f"{label} {dtype}", found, plus, limit)


def check_magnitudes(checks: Checks, seed: int) -> None:
    """Rows of any magnitude, with outliers; rows of zeros, and NaNs and infinities, which stay in their row."""
    prepare([[ONE]], (16, 40, 64, 128))
    prepare([[ONE]], (16, 64, 128), int8=True)
    shard = Shard(*ONE, 14336, 512, 0, 512)
    tensors = random_weights(shard, seed)
    for magnitude in (1e-20, 1e-3, 1.0, 1e4, 1e20):
        x = torch.randn(40, 14336, device="cuda") * magnitude
        x[0, 17] = 3000 * magnitude
        expected = exact(x, shard, *tensors)
        for rows, row in ((16, 0), (16, 1), (40, 0), (40, 39)):
            found = run(checks, f"{magnitude}", x[:rows], tensors, None, (shard,))
            name = f"{magnitude} M={rows} row {row}"
            checks.compare(name, "magnitude", found[row], expected[row], 7e-4)
    x = torch.randn(120, 14336, device="cuda")
    x[1], x[2, 5], x[3, 14335] = 0, math.nan, math.inf
    for partition in (None, GemmPartition(4, False), GemmPartition(16, True)):
        for rows, int8 in ((16, False), (60, False), (120, False), (16, True), (120, True)):
            name = f"zeros {partition} M={rows} int8={int8}"
            found = run(checks, name, x[:rows], tensors, None, (shard,), partition, int8=int8)
            checks.done += 1
            if not (found[1] == 0).all() or not found[2].isnan().all() or found[3].isfinite().any():
                checks.failed.append(f"{name}: rows of zeros, NaN or infinity came out wrong")
            if not found[[0, *range(4, rows)]].isfinite().all():
                checks.failed.append(f"{name}: a row of NaN or infinity spoiled others")


def _spikes(width: int, suh: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows whose rotation has channels of a common sign, which is where what byte sums leave out is large."""
    signs, alternating = suh.sign().float(), torch.tensor([1.0, -1.0], device="cuda").repeat(width // 256)
    rows = {name: torch.zeros(width, device="cuda") for name in ("equal", "alternating", "any", "single", "signed")}
    rows["one large"], rows["one large and negative"] = (torch.randn(width, device="cuda") * 1e-3 for _ in range(2))
    rows["one large"][0], rows["one large and negative"][640] = 300, -300
    rows["equal"][::128], rows["alternating"][::128], rows["any"][37::128], rows["single"][5] = 1, alternating, 1, 1
    rows["signed"][::128] = signs[::128]  # the worst: every 128-block adds up
    rows["ones"] = torch.ones(width, device="cuda")
    return rows


def check_spikes(checks: Checks, seed: int) -> None:
    """One large channel, and one in each 128-block, of equal and alternating signs.

    Limits are above what such rows give where sums in fp32 are truncated at every product: twice the rounding of
    activations to fp16, and for signs that are made to add up 3e-7 a channel.
    """
    prepare([[ONE]], (16,))
    for width in (8192, 28672):
        shard = Shard(*ONE, width, 1024, 0, 1024)
        tensors = random_weights(shard, seed)
        rows = _spikes(width, tensors[1])
        for dtype in (torch.float32, torch.float16):
            x = torch.stack(list(rows.values())).to(dtype)
            expected = exact(x, shard, *tensors)
            for partition in (None, GemmPartition(4, False)):
                found = run(checks, f"spikes {width} {partition}", x, tensors, None, (shard,), partition)
                for row, name in enumerate(rows):
                    # 1.1e-2 at 28672 inputs in one chain of sums, which no chosen cut makes (docs/kernels-gpu.md).
                    limit = 5e-7 * width if name == "signed" else 1e-3
                    checks.compare(
                        f"{name} {width} {dtype} {partition}", f"spikes {name}", found[row], expected[row], limit
                    )


def check_served(checks: Checks, seed: int) -> None:
    """Layers as they are served, eagerly and in a replayed graph: what dispatch picks, and the kernel itself."""
    prepare([[ONE]], GEMM_TILES)
    limits = runtime.device(torch.cuda.current_device()).limits
    for shape in ((4096, 14336), (4096, 28672)):
        shard = Shard(*ONE, *shape, 0, shape[1])
        tensors, layout = random_weights(shard, seed), pack_shards([shard])
        linear.prepare([(tuple(layout), shape[0])], torch.device("cuda", torch.cuda.current_device()))
        x = torch.randn(112, shape[0], device="cuda").half()
        expected = exact(x, shard, *tensors)
        for rows in (9, 16, 24, 33, 64, 112):
            served = linear.linear(x[:rows], *tensors, None, layout)
            checks.compare(f"served {shape} M={rows}", "served", served, expected[:rows], LIMITS[torch.float16])
            eager = run(checks, f"{shape} M={rows}", x[:rows], tensors, None, (shard,))
            checks.compare(f"{shape} M={rows}", "large", eager, expected[:rows], LIMITS[torch.float16])
            if gemm.choose((shard,), rows, limits) is False:  # the GEMM, not with int8
                checks.same(f"served {shape} M={rows}", served, eager)
            captured, graph = torch.empty_like(eager), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(2):  # the second starts while the first one ends
                    gemm.gemm(x[:rows], *tensors, None, (shard,), captured)
            for _ in range(2):
                captured.fill_(math.nan)
                graph.replay()
                torch.cuda.synchronize()
                checks.same(f"graph {shape} M={rows}", captured, eager)


CHECKS = (
    check_every_kind,
    check_every_kind_of_int8,
    check_cuts,
    check_batches,
    check_layers,
    check_magnitudes,
    check_spikes,
    check_served,
)


def check_all(checks: Checks, seed: int) -> None:
    """Everything, on inputs of this seed."""
    torch.manual_seed(seed)
    for check in CHECKS:
        check(checks, seed)
