"""Routed experts in one call of the C++ library: threads, batches, concurrency, memory, and arguments of no layer."""

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.cpu_cases import EVERY_KIND, needs_library
from tests.ops.moe_layers import MoELayer, random_layer, random_routing
from vllm_exl3.cpu import backend
from vllm_exl3.cpu.context import Context
from vllm_exl3.cpu.library import MoECallStruct, library
from vllm_exl3.cpu.moe import moe_native, moe_struct, reserve, run_struct
from vllm_exl3.ops.activation import ACTIVATIONS
from vllm_exl3.ops.moe import MoECall, moe_reference, sum_choices
from vllm_exl3.ops.moe_by_expert import grouped_experts
from vllm_exl3.pack.stored import Codebook

pytestmark = needs_library

BOUND = 1e-3
"""Of the error relative to the reference, as in test_moe.py."""
MIXED = [(half_bits / 2, codebook) for codebook, half_bits in (*EVERY_KIND[::3], *EVERY_KIND[1::3], *EVERY_KIND[2::3])]
NUMBERS = {"swiglu": (1.7, 1.0, 7.0), "swiglu_step": (1.0, 0.0, 3.0), "situ": (2.0, 3.0, math.inf)}


def inputs(tokens: int, hidden: int, seed: int = 3) -> torch.Tensor:
    return torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(seed))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def run(
    x: torch.Tensor, arguments: tuple[Any, ...], context: Context | None = None, *, slots: bool = False
) -> torch.Tensor:
    call = MoECall(*arguments)
    shape = (*call.topk_ids.shape, x.shape[1]) if slots else x.shape
    out = torch.full(shape, torch.nan, dtype=torch.float32 if slots else x.dtype)
    struct, held = moe_struct(x, call, out, context, slots=slots)
    run_struct(struct)
    del held
    return out


@pytest.fixture(scope="module")
def layer() -> MoELayer:
    """Ten experts, their projections at every rate and codebook, with padding on both sides."""
    return random_layer(10, 200, 330, MIXED, bias=True)


@pytest.fixture
def context() -> Iterator[Context]:
    with Context(3) as made:
        yield made


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_layer_and_routing(data: st.DataObject) -> None:
    draw = data.draw
    name = draw(st.sampled_from(list(ACTIVATIONS)))
    hidden, intermediate = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    experts, top_k, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(0, 40))
    kinds = draw(st.lists(st.sampled_from(MIXED), min_size=1, max_size=3))
    layer = random_layer(
        experts, hidden, intermediate, kinds, gated=ACTIVATIONS[name].gated, bias=draw(st.booleans()),
        activation=(name, *NUMBERS.get(name, (1.0, 0.0, math.inf))), seed=tokens,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(
        -1, experts + 1, (tokens, top_k), generator=generator, dtype=draw(st.sampled_from((torch.int32, torch.int64)))
    )
    weights = torch.rand((tokens, top_k), generator=generator)
    dtype = draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    x = inputs(tokens, hidden).to(dtype)
    arguments = layer.arguments(weights, ids, on_input=draw(st.booleans()))
    found = run(x, arguments)
    assert found.dtype == dtype
    # Of few channels the error may by chance be many deviations of the usual: results cancel.
    few, rounding = 1 + 5 / math.sqrt(min(hidden, intermediate)), torch.finfo(dtype).eps
    if min(hidden, intermediate) >= 64:
        assert relative(found, moe_reference(x, *arguments)) < BOUND * few + rounding
    by_linear = grouped_experts(backend.linear, x, MoECall(*arguments))
    assert relative(found, by_linear) < 1e-4 * few + rounding


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 30])
def test_equal_to_one_linear_after_another(isa: str, name: str, tokens: int) -> None:
    """The same linears with torch's activations between them: what differs are roundings of the activation."""
    layer = random_layer(
        3,
        256,
        200,
        MIXED[:7],
        gated=ACTIVATIONS[name].gated,
        activation=(name, *NUMBERS.get(name, (1.0, 0.0, math.inf))),
    )
    arguments = layer.arguments(*random_routing(tokens, 3, 2))
    x = inputs(tokens, 256)
    by_linear = grouped_experts(backend.linear, x, MoECall(*arguments))
    assert relative(moe_native(x, *arguments), by_linear) < 5e-5


def test_bits_do_not_depend_on_threads(isa: str, layer: MoELayer) -> None:
    for tokens in (1, 3, 90):
        x, arguments = inputs(tokens, 200), layer.arguments(*random_routing(tokens, 10, 4))
        alone = run(x, arguments)
        for threads in (1, 2, 3, 5):
            with Context(threads, spin_us=0 if threads == 3 else 50) as context:
                for _ in range(2):
                    assert torch.equal(run(x, arguments, context), alone), (tokens, threads)


def test_nor_on_the_other_tokens(isa: str, layer: MoELayer, context: Context) -> None:
    tokens = 61
    x, (weights, ids) = inputs(tokens, 200), random_routing(tokens, 10, 3)
    ids[::7, 1] = -1
    whole = run(x, layer.arguments(weights, ids), context)
    for rows in (slice(0, 1), slice(5, 7), slice(20, 45), slice(60, 61)):
        assert torch.equal(run(x[rows], layer.arguments(weights[rows], ids[rows]), context), whole[rows])


@pytest.mark.parametrize("on_input", [False, True])
def test_results_of_choices_add_up_in_their_order(layer: MoELayer, context: Context, on_input: bool) -> None:
    """Split over two sets of experts, the sum of a token's choices has the bits of the whole."""
    x, (weights, ids) = inputs(23, 200), random_routing(23, 10, 4)
    whole = run(x, layer.arguments(weights, ids, on_input=on_input), context)
    results = torch.zeros((23, 4, 200))
    for here in (range(0, 6), range(6, 10)):
        mine = torch.where((ids >= here.start) & (ids < here.stop), ids, -1)
        part = run(x, layer.arguments(weights, mine, on_input=on_input), context, slots=True)
        assert torch.equal(part.isnan().all(-1), mine < 0) and torch.equal(part.isnan().any(-1), mine < 0)
        results += part.nan_to_num(0)
    assert torch.equal(sum_choices(results), whole)


def test_sums_in_float32_are_those_before_the_cast(layer: MoELayer, context: Context) -> None:
    x, arguments = inputs(5, 200).bfloat16(), layer.arguments(*random_routing(5, 10, 4))
    wide = torch.empty(x.shape)
    struct, _held = moe_struct(x, MoECall(*arguments), wide, context)
    run_struct(struct)
    assert torch.equal(wide.bfloat16(), run(x, arguments, context))


def test_more_tokens_than_are_computed_at_once(context: Context) -> None:
    """64 choices a token, nearly all of no expert: their memory is that of 64."""
    layer, tokens = random_layer(2, 128, 128, [(4, Codebook.MUL1)]), 2500
    ids = torch.full((tokens, 64), -1)
    ids[:, 17] = torch.arange(tokens) % 2
    weights = torch.full((tokens, 64), 0.5)
    x = inputs(tokens, 128)
    found = run(x, layer.arguments(weights, ids), context)
    few = torch.randint(0, tokens, (20,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(found[few], run(x[few], layer.arguments(weights[few, 17:18], ids[few, 17:18])))


def test_no_tokens_no_experts_and_experts_that_nobody_chose(layer: MoELayer, context: Context) -> None:
    for ids in (torch.zeros((0, 3), dtype=torch.int32), torch.full((4, 3), -1), torch.full((4, 3), 10)):
        x = inputs(len(ids), 200)
        assert not run(x, layer.arguments(torch.ones(ids.shape), ids), context).any()
    ids = torch.zeros((4, 1), dtype=torch.int32)
    x, arguments = inputs(4, 200), layer.arguments(torch.ones(4, 1), ids)
    expected = run(x, arguments, context)
    call = MoECall(*arguments)
    call.table[1:] = -1  # nobody reads their rows
    assert torch.equal(run(x, tuple(call), context), expected)


def test_what_is_not_finite_stays_in_its_token(layer: MoELayer, context: Context) -> None:
    x, (weights, ids) = inputs(9, 200), random_routing(9, 10, 4)
    clean = run(x, layer.arguments(weights, ids), context)
    x[4, 17] = torch.inf
    weights[6, 2] = torch.nan
    ids[7, 0], weights[7, 0] = -1, torch.nan  # of no expert: its weight is not read
    found = run(x, layer.arguments(weights, ids), context)
    assert found[4].isnan().all() and found[6].isnan().all() and not found[7].isnan().any()
    keep = [0, 1, 2, 3, 5, 8]
    assert torch.equal(found[keep], clean[keep])


def test_calls_from_several_threads(layer: MoELayer, context: Context) -> None:
    """On a context of each, on one that they share, and on none, each with the bits of a call alone."""
    cases = [(inputs(n, 200, n), layer.arguments(*random_routing(n, 10, 4, n))) for n in (1, 2, 9, 40)]
    expected = [run(*case) for case in cases]

    def repeat(number: int, own: Context | None) -> bool:
        x, arguments = cases[number]
        return all(torch.equal(run(x, arguments, own), expected[number]) for _ in range(15))

    with Context(2) as first, Context(2, spin_us=0) as second, ThreadPoolExecutor(4) as callers:
        for contexts in ((first, second, first, second), (context,) * 4, (None,) * 4, (None, first, None, context)):
            assert all(callers.map(repeat, range(4), contexts))


def test_a_reserved_context_does_not_grow(layer: MoELayer) -> None:
    sizes = MoECall(*layer.arguments(torch.ones(70, 4), torch.zeros(70, 4)))
    with Context(2) as context:
        struct, _held = moe_struct(inputs(70, 200), sizes, torch.empty(70, 200), context)
        struct.x = struct.ids = struct.weights = struct.out = None  # they need not be there yet
        reserve(struct)
        before = context.scratch_bytes
        assert before > 0
        for tokens in (70, 1, 33):
            for ids in (
                random_routing(tokens, 10, 4)[1],
                torch.zeros(tokens, 4),
                torch.arange(4 * tokens).view(tokens, 4) % 10,
            ):
                run(inputs(tokens, 200), layer.arguments(torch.ones(tokens, 4), ids), context)
        assert context.scratch_bytes == before
        struct.tokens = 1 << 40
        reserve(struct)  # parts of a prompt have a most
        assert before < context.scratch_bytes < 1 << 30


Change = Callable[[MoECallStruct], None]


def field(name: str, value: object) -> Change:
    return lambda struct: setattr(struct, name, value)


def flat(name: str, leaf: str, value: int | None) -> Change:
    return lambda struct: setattr(getattr(struct, name), leaf, value)


SIZES = ("tokens", "hidden", "intermediate", "top_k", "experts")
FLAT = [(name, leaf) for name in ("w13", "w2") for leaf in ("trellis", "suh", "svh")]
BAD_CALLS: list[tuple[Change, str]] = [
    *((field(name, None), "null") for name in ("x", "ids", "weights", "out", "table")),
    *((flat(name, leaf, None), "null") for name, leaf in FLAT),
    *((flat(name, f"{leaf}_size", 100), "flat tensors") for name, leaf in (*FLAT, ("w13", "bias"), ("w2", "bias"))),
    *((field(name, -1), "negative or beyond") for name in SIZES),
    *((field(name, 0), "negative or beyond") for name in ("hidden", "intermediate", "top_k", "out_stride")),
    *((field(name, 1 << 41), "negative or beyond") for name in SIZES),
    *((field(name, value), "dtype") for name in ("dtype", "out_dtype") for value in (-1, 3)),
    *((field("id_bytes", value), "ids") for value in (0, 2, 16)),
    *((field("activation", value), "activation") for value in (-1, 5, 9)),
    *((field("projections", value), "activation") for value in (0, 2, 4)),
    *((field("hidden", value), "fit the layer") for value in (257, 1000)),
    (field("intermediate", 385), "fit the layer"),
    (lambda struct: (setattr(struct, "slots", 1), setattr(struct, "out_dtype", 1)), "slots"),
]


@pytest.mark.parametrize(("change", "said"), BAD_CALLS)
def test_a_call_of_no_layer_is_refused(layer: MoELayer, context: Context, change: Change, said: str) -> None:
    call = MoECall(*layer.arguments(*random_routing(3, 10, 4)))
    struct, _held = moe_struct(inputs(3, 200), call, torch.empty(3, 200), context)
    struct.out_stride = max(struct.out_stride, 2000)
    change(struct)
    with pytest.raises(RuntimeError, match=said):
        run_struct(struct)


COLUMNS = ("trellis", "suh", "svh", "bias", "half_bits", "codebook", "in_features", "out_features")
BAD_ROWS = [
    *((name, value) for name in ("trellis", "suh", "svh") for value in (-2, 1 << 40, (1 << 63) - 2)),
    *((name, value) for name in ("in_features", "out_features") for value in (0, -128, 128, 250, 1 << 40)),
    *(("half_bits", value) for value in (0, 1, 9, 18, -8)),
    *(("codebook", value) for value in (-1, 3)),
    ("trellis", 1),
    ("bias", 1 << 40),
]


@pytest.mark.parametrize(("column", "value"), BAD_ROWS)
@pytest.mark.parametrize("projection", [0, 1, 2])
def test_a_row_of_no_expert_is_refused(
    layer: MoELayer, context: Context, projection: int, column: str, value: int
) -> None:
    call = MoECall(*layer.arguments(torch.ones(2, 1), torch.tensor([[3], [-1]])))
    call.table[3, projection, COLUMNS.index(column)] = value
    with pytest.raises(RuntimeError, match="an expert's bit rate"):
        run(inputs(2, 200), tuple(call), context)
    struct, _held = moe_struct(inputs(2, 200), call, torch.empty(2, 200), context)
    with pytest.raises(RuntimeError, match="an expert's bit rate"):
        reserve(struct)


def test_no_call_and_no_context_are_refused() -> None:
    for function in ("exl3_moe", "exl3_moe_reserve"):
        assert b"null" in library().exl3_error_text(getattr(library(), function)(None))
    assert b"null" in library().exl3_error_text(library().exl3_moe_reserve(MoECallStruct()))
    assert b"null" in library().exl3_error_text(library().exl3_context_create(1, None, 0, None))
    library().exl3_context_destroy(None)
    assert library().exl3_context_bytes(None) == 0


@pytest.mark.parametrize(
    "change", [{"threads": 0}, {"threads": -1}, {"threads": 2000}, {"spin_us": -1}, {"spin_us": 2_000_000}]
)
def test_contexts_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match="a context needs"):
        Context(**{"threads": 2, **change})


@pytest.mark.skipif(sys.platform != "linux", reason="needs CPU affinity")
def test_threads_run_on_their_processors(layer: MoELayer) -> None:
    cpu = min(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    with Context(3, [cpu, cpu]) as context:
        started = set(os.listdir("/proc/self/task")) - before
        assert [os.sched_getaffinity(int(thread)) for thread in started] == [{cpu}, {cpu}]
        x, arguments = inputs(5, 200), layer.arguments(*random_routing(5, 10, 4))
        assert torch.equal(run(x, arguments, context), run(x, arguments))
    assert set(os.listdir("/proc/self/task")) & started == set()
    with pytest.raises(RuntimeError, match="no such processor"):
        Context(2, [1 << 20])
    with pytest.raises(ValueError, match="found 1 processors, expected 2"):
        Context(3, [cpu])


ALONE = """
import os, resource, sys
from vllm_exl3.cpu.context import Context
from vllm_exl3.cpu.library import MoECallStruct, library
context = Context(2)
child = os.fork()
if not child:  # a fork has no threads: it is told so, and may leave the context behind
    sizes = dict(hidden=1, intermediate=1, top_k=1, out_stride=1, id_bytes=4, projections=3)
    struct = MoECallStruct(context=context.address, **sizes)
    said = library().exl3_error_text(library().exl3_moe(struct)).decode()
    context.close()
    print(said, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("torch" in sys.modules)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), used + (1 << 20)))
try:
    Context(4)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
def test_forks_and_systems_without_threads_are_told() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr[-500:]
    assert "another process" in lines[0] and lines[1] == "False" and "the system starts no so many" in lines[2]


def test_the_structure_matches_the_header() -> None:
    assert ctypes.sizeof(MoECallStruct) == 6 * 8 + 2 * 64 + 7 * 8 + 3 * 4 + 8 * 4 + 4
