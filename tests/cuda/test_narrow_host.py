"""The kernels for few tokens, compiled for the host and held against float64: what a GPU would run, thread by thread.

Tensor-core instructions and shared memory's limits are those of host/; what is in flight when only a GPU shows
(tests/gpu).
"""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.cuda.host_kernels import HostKernels, build
from vllm_exl3.cuda.binding import ELEMENTS
from vllm_exl3.cuda.geometry import Form, GpuLimits, LinearPlan
from vllm_exl3.cuda.narrow import NARROW_32, inverse_of, plan_narrow
from vllm_exl3.cuda.narrow_partition import NarrowPartition as Partition
from vllm_exl3.ops.shards import Shard
from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.pack.tile import unpack_states

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

LIMITS = GpuLimits("sm_90a", 5, 232448)
MUL1, MIXED, DECODED = (8, 2), ((5, 2), (8, 0), (8, 1), (12, 2)), ((5, 2), (6, 1), (8, 0), (8, 1), (12, 2))
"""Kinds that host/narrow.cpp knows."""


class Memory:
    """Arrays at addresses that are multiples of 256, like a GPU's allocations; kept as long as this lives."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def place(self, values: np.ndarray) -> int:
        """Address of a copy."""
        raw = np.full(values.nbytes + 512, 0xFF, np.uint8)
        start = -raw.ctypes.data % 256
        raw[start : start + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).ravel()
        self._kept.append(raw)
        return raw.ctypes.data + start


@dataclass(frozen=True)
class Case:
    """A launch: its kernel in host/narrow.cpp, form, shards as (kind, in blocks, out blocks), tokens, how it is cut."""

    kernel: int
    form: Form
    shards: tuple[tuple[tuple[int, int], int], ...]
    depth: int
    width: int
    rows: int
    partition: Partition
    rotated: bool
    dtype: torch.dtype = torch.float16
    clustered: bool = False


def _cases() -> dict[str, Case]:
    mul1 = ((MUL1, 4),)
    mixed = tuple((kind, 2) for kind in MIXED)
    decoded = tuple((kind, 2) for kind in DECODED)
    return {
        "one token, equal parts": Case(0, Form(True, 4), mul1, 5, 640, 1, Partition(1, 3, 6), False),
        "four tokens, two columns a warp": Case(
            0, Form(True, 4), mul1, 4, 512, 4, Partition(2, 2, 2), False, torch.bfloat16
        ),
        "three tokens, cut anywhere, narrow input": Case(0, Form(True, 4), mul1, 3, 300, 3, Partition(1, 0, 4), False),
        "kinds, cut anywhere": Case(1, Form(True, 8), mixed, 2, 256, 6, Partition(1, 0, 5), False, torch.float32),
        "kinds, rotated before": Case(1, Form(True, 8), mixed, 2, 256, 6, Partition(1, 0, 5), True, torch.float32),
        "fast mode": Case(4, Form(True, 8, True), mul1, 2, 256, 7, Partition(1, 2, 4), False),
        "decoded, 8 tokens": Case(2, Form(False, 8), decoded, 2, 256, 7, Partition(1, 0, 5), False, torch.float32),
        "decoded, 16 tokens": Case(3, Form(False, 16), decoded, 2, 256, 13, Partition(1, 0, 5), False),
        "decoded, two columns a warp": Case(
            3, Form(False, 16), tuple((kind, 3) for kind in DECODED), 2, 256, 16, Partition(2, 0, 3), False
        ),
        "a cluster of one block": Case(
            3,
            Form(False, 16),
            tuple((kind, 3) for kind in DECODED),
            2,
            256,
            11,
            Partition(1, 1, 10),
            False,
            clustered=True,
        ),
        "rotated in two rounds": Case(0, Form(True, 4), ((MUL1, 1),), 10, 1280, 4, Partition(1, 0, 1), False),
        "decoded, rotated in two rounds": Case(
            2, Form(False, 8), tuple((kind, 1) for kind in DECODED), 11, 1408, 7, Partition(1, 0, 5), False
        ),
        "fetched in halves": Case(0, Form(True, 4), ((MUL1, 1),), 40, 5120, 4, Partition(1, 0, 1), True),
        "many tokens": Case(5, NARROW_32, ((DECODED[0], 1),), 2, 256, 19, Partition(1, 0, 2), False),
        "many tokens, kinds": Case(5, NARROW_32, decoded, 2, 256, 27, Partition(1, 0, 5), False, torch.float32),
        "many tokens, several at once": Case(
            5, NARROW_32, tuple((kind, 3) for kind in DECODED), 7, 890, 32, Partition(1, 3, 30), False
        ),
        "many tokens, two tiles, rotated before": Case(5, NARROW_32, decoded, 2, 250, 39, Partition(1, 2, 10), True),
        "decoded, two tiles, rotated before": Case(3, Form(False, 16), decoded, 2, 250, 18, Partition(1, 2, 10), True),
    }


CASES = _cases()
QUICK = ("one token, equal parts", "kinds, cut anywhere", "decoded, 8 tokens", "a cluster of one block", "many tokens")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return build("narrow", tmp_path_factory.mktemp("narrow"))


def _layer(case: Case) -> tuple[tuple[Shard, ...], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(len(CASES))
    shards, tensors = [], []
    for (half_bits, codebook), blocks in case.shards:
        shard = Shard(half_bits, codebook, case.depth * 128, blocks * 128, 0, blocks * 128)
        trellis = torch.randint(-(2**15), 2**15, (shard.trellis_words,), generator=generator, dtype=torch.int16)
        scales = [
            (
                (torch.rand(size, generator=generator) + 0.5)
                * (torch.randint(0, 2, (size,), generator=generator) * 2 - 1)
            ).half()
            for size in (shard.in_features, shard.out_features)
        ]
        shards.append(shard)
        tensors.append((trellis, *scales))
    return tuple(shards), tensors


def _run(
    library: HostKernels, case: Case, x: torch.Tensor, stale: np.ndarray | None = None, at_once: bool = False
) -> torch.Tensor:
    """Results of a launch; ``stale`` are words that scratch may hold before, else 1, that of a taken share."""
    shards, tensors = _layer(case)
    plan: LinearPlan = plan_narrow(shards, x.shape[0], case.width, case.form, LIMITS, case.partition, case.rotated)
    memory, arguments = Memory(), plan.arguments_type.from_buffer_copy(plan.arguments)
    out = torch.full((x.shape[0], plan.out_features), float("nan"), dtype=x.dtype)
    words = np.array([1], np.uint32) if stale is None else stale
    scratch = memory.place(np.random.default_rng(len(words)).choice(words, plan.scratch // 4))
    for name, offset in plan.scratch_parts.items():
        setattr(arguments, name, scratch + offset)
    if plan.counters:
        arguments.counters = memory.place(np.zeros(plan.counters, np.uint32))
    for shard, (trellis, suh, svh) in zip(arguments.shards, tensors, strict=False):
        shard.trellis, shard.suh, shard.svh = (memory.place(t.view(torch.int16).numpy()) for t in (trellis, suh, svh))
    arguments.x, arguments.x_stride, arguments.x_type = x.data_ptr(), x.stride(0), ELEMENTS[x.dtype]
    arguments.out, arguments.out_stride, arguments.out_type = out.data_ptr(), out.stride(0), ELEMENTS[out.dtype]
    if plan.transform is not None:
        library.run_rotate(ctypes.byref(arguments), case.kernel, *plan.transform.grid, plan.transform.shared)
    # The plan makes no cluster of one block, and reserves no memory for what its blocks exchange.
    shared = plan.shared + case.clustered * case.form.tile_rows * 2 * 512
    block = case.partition.columns, int(case.clustered)
    library.run_narrow(ctypes.byref(arguments), case.kernel, *block, *plan.grid, shared, int(at_once))
    if plan.counters:
        left = (ctypes.c_uint32 * plan.counters).from_address(arguments.counters)
        assert not any(left), "counters are zero again behind a launch"
    return out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_against_float64(library: HostKernels, name: str) -> None:
    case = CASES[name]
    x = torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(case.rows)).to(case.dtype)
    found = _run(library, case, x)
    shards, tensors = _layer(case)
    wide = torch.zeros(case.rows, case.depth * 128, dtype=torch.float64)
    wide[:, : case.width] = x
    parts = []
    for shard, (trellis, suh, svh) in zip(shards, tensors, strict=True):
        dense = decode(trellis.view(shard.trellis_shape), shard.half_bits, shard.codebook).double()
        parts.append(hadamard(hadamard(wide * suh.double()) @ dense) * svh.double())
    expected = torch.cat(parts, dim=1)
    error = ((found.double() - expected).norm() / expected.norm()).item()
    assert error < (1.5e-2 if case.form.fast else 4e-3 if case.dtype == torch.bfloat16 else 6e-4)
    assert torch.equal(_run(library, case, x[-1:].contiguous()), found[-1:])  # a row alone


@pytest.mark.parametrize("name", ("one token, equal parts", "kinds, cut anywhere", "decoded, 16 tokens"))
def test_what_scratch_held_before_says_nothing(library: HostKernels, name: str) -> None:
    """Words of another launch or of anybody else, among them those that mean something: turns, missing sums, NaN."""
    case = CASES[name]
    x = torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(2)).to(case.dtype)
    expected = _run(library, case, x)
    meant = np.array([0, 1, 2, 3, 0xFFFFFFFF, 0x7FFFFFFF, 0x3F800000], np.uint32)
    anything = np.random.default_rng(3).integers(0, 1 << 32, 1000, np.uint32)
    for stale in (meant, np.concatenate([np.repeat(meant, 100), anything])):
        assert torch.equal(_run(library, case, x, stale), expected)


@pytest.mark.parametrize(
    "name",
    (
        "one token, equal parts",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("kinds, cut anywhere", "decoded, 16 tokens")),
    ),
)
def test_blocks_at_once_and_in_turn_give_the_same(library: HostKernels, name: str) -> None:
    """At once they wait for each other's sums and share what ends an n tile; in turn the last one does it all."""
    case = CASES[name]
    x = torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(4)).to(case.dtype)
    expected = _run(library, case, x)
    for _ in range(3):
        assert torch.equal(_run(library, case, x, at_once=True), expected)


@pytest.mark.parametrize("name", ("four tokens, two columns a warp", "decoded, 8 tokens"))
def test_a_row_of_nan_is_not_waited_for(library: HostKernels, name: str) -> None:
    """Sums that have not arrived are NaN as well, of a kind that no arithmetic makes."""
    case = CASES[name]
    x = torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    expected = _run(library, case, x)
    x[1, 5] = float("nan")
    found = _run(library, case, x)
    assert found[1].isnan().all()
    assert torch.equal(found[2:], expected[2:])
    assert torch.equal(found[0], expected[0])


MULTIPLIERS, ADDENDS = {2: 0x83DCD12D, 1: 0xCBAC1FED, 0: 89226354}, {2: 0, 1: 0, 0: 64248484}
"""By which the codebooks make product words of states, and what they add."""


@pytest.mark.parametrize("half_bits", (*range(2, 17, 2), 3, 5, 7))
@pytest.mark.parametrize("codebook", MULTIPLIERS)
@pytest.mark.parametrize("decoded", (0, 1))
def test_product_words_of_every_kind(library: HostKernels, half_bits: int, codebook: int, decoded: int) -> None:
    tiles = np.random.default_rng(half_bits).integers(0, 1 << 16, (20, 8 * half_bits), dtype=np.uint16)
    found = np.zeros((20, 256), np.uint32)
    for tile, words in zip(tiles, found, strict=True):
        arguments = (ctypes.c_void_p(array.ctypes.data) for array in (tile, words))
        library.run_words(next(arguments), half_bits, codebook, decoded, next(arguments))
    states = unpack_states(tiles.view(np.int16), half_bits).astype(np.uint64)
    expected = ((states * MULTIPLIERS[codebook] + ADDENDS[codebook]) & 0xFFFFFFFF).astype(np.uint32)
    if codebook != Codebook.MUL1:
        expected = expected & 0x8FFF8FFF ^ 0x3B603B60
    np.testing.assert_array_equal(found, expected)


def _around_multiples(divisors: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers up to ``most`` at and beside multiples of divisors, where rounding shows, and the divisors."""
    largest, random = (most - 1) // divisors, np.random.default_rng(2).random((4, len(divisors)))
    multiples = divisors * np.concatenate([(random * largest).astype(np.int64), largest[None], 0 * largest[None]])
    n = np.stack([np.maximum(multiples - 1, 0), multiples, multiples + 1]).astype(np.uint32)
    return n, np.tile(divisors, (*n.shape[:2], 1)).astype(np.uint32)


def _run_division(function: Callable[..., None], n: np.ndarray, d: np.ndarray) -> np.ndarray:
    found = np.zeros_like(n)
    function(*(ctypes.c_void_p(array.ctypes.data) for array in (n, d, found)), n.size)
    return found


def test_quotients_of_anything_a_launch_divides(library: HostKernels) -> None:
    """Also with reciprocals one k block off, as the GPU's may be."""
    divisors = np.concatenate([np.arange(1, 2000), np.random.default_rng(1).integers(2000, 1 << 21, 2000)])
    n, d = _around_multiples(divisors, np.full_like(divisors, (1 << 21) - 1))
    np.testing.assert_array_equal(_run_division(library.run_quotient, n, d), n // d)
    for towards in (0.0, 2.0):
        inverse = np.nextafter(np.float32(1) / d.astype(np.float32), np.float32(towards))
        np.testing.assert_array_equal(((n.astype(np.float32) + np.float32(0.5)) * inverse).astype(np.uint32), n // d)


def test_divisions_by_inverses_that_the_host_made(library: HostKernels) -> None:
    divisors = np.arange(1, 3000)
    n, d = _around_multiples(divisors, ((1 << 31) - 1) // divisors - 1)
    n = np.minimum(n, (1 << 31) - 1)  # what is doubled has 32 bits
    inverses = (
        np.array([inverse_of(int(divisor)) for divisor in divisors])[None, None].repeat(3, 0).repeat(n.shape[1], 1)
    )
    np.testing.assert_array_equal(_run_division(library.run_over, n, inverses.astype(np.uint32)), n // d)
