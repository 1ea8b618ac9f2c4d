"""Experts that the CPU computes beside the GPU: the method's division of a layer, and a whole engine with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cuda.share_driver import DONE, MAIN, FakeDriver, playing
from tests.ops.moe_layers import random_layer, random_routing
from tests.serving.by_address import moe_by_address, pretend_gpu
from tests.serving.conftest import PACKS, golden_logits, relative_error
from tests.serving.engine import engine, logits_of
from tests.serving.moe_module import MIXED, build, inputs, load, open_pack, run, stored
from vllm_exl3 import runtime_diagnostics
from vllm_exl3.cpu import library
from vllm_exl3.cuda.share import SideStream
from vllm_exl3.ops import backends
from vllm_exl3.serving import expert_tiers
from vllm_exl3.serving.expert_tiers import cpu_threads

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

QWEN = "qwen3_moe-3.0-mul1"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    pretend_gpu(monkeypatch)
    with playing(monkeypatch) as fake:
        fake.immediate = False
        yield fake


def side(hidden: int, top_k: int) -> SideStream:
    return SideStream(2, None, 8, hidden, top_k)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float(torch.dist(found, wanted) / wanted.norm()) < 1e-3


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rank", "ranks", "here", "resident"),
    [(0, 1, None, {0, 2}), (0, 1, None, set()), (1, 2, None, {1}), (0, 1, [3, 1], {3})],
)
def test_a_divided_layer_gives_the_whole_one_s_sum(
    tmp_path: Path,
    driver: FakeDriver,
    rank: int,
    ranks: int,
    here: list[int] | None,
    resident: set[int],
    bias: bool,
    on_input: bool,
) -> None:
    layer = random_layer(4, 256, 384, MIXED, bias=bias)
    tensors = stored(layer, padded_bias=bias)
    pack = open_pack(tmp_path, tensors)
    options = {"rank": rank, "ranks": ranks, "here": here, "apply_router_weight_on_input": on_input}
    whole = build(pack, layer, **options)
    divided = build(pack, layer, resident=frozenset(resident), side=side, **options)
    for module in (whole, divided):
        load(module, tensors)
    stream = side(256, 2)
    divided.quant_method.config.expert_tiers.side_stream = lambda hidden, top_k: stream
    for tokens in (1, 8, 9):
        x, route = inputs(tokens, 256), random_routing(tokens, 4, 2)
        backends.reset_calls()
        assert close(run(divided, x, *route), run(whole, x, *route))
        assert ("moe", "cpu_share", "RoutedExperts") in backends.calls() or tokens > 8
        assert ("moe", "native", "RoutedExperts") in backends.calls() or tokens > 8 or not resident
        assert tokens < 9 or ("moe", "cpu_share", "RoutedExperts") not in backends.calls()
    assert driver.calls.count(f"wait {MAIN} {DONE:#x}") == 2


def test_the_gpu_s_share_is_enqueued_before_the_cpu_s_is_waited_for(
    tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both overlap only then."""
    layer = random_layer(2, 128, 128)
    module = build(open_pack(tmp_path, stored(layer)), layer, resident=frozenset({0}), side=side)
    load(module, stored(layer))

    def gpu(x: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        driver.calls.append("gpu")
        return moe_by_address(x, *arguments, **options)

    backend = backends.Backend("moe", "cuda", "native", gpu, lambda: None)
    monkeypatch.setitem(backends._choices, ("moe", "cuda"), backends.Choice(backend))
    run(module, inputs(2, 128), *random_routing(2, 2, 2))
    assert [name for name in driver.calls if name.startswith(("host", "gpu"))] == ["host 8", "gpu"]
    assert driver.calls.index("gpu") < driver.calls.index(f"wait {MAIN} {DONE:#x}")


def test_sixteen_bit_sums_are_rounded_once(tmp_path: Path, driver: FakeDriver) -> None:
    layer = random_layer(4, 256, 128)
    pack = open_pack(tmp_path, stored(layer))
    module = build(pack, layer, resident=frozenset({0, 1}), side=side)
    load(module, stored(layer))
    x, route = inputs(4, 256), random_routing(4, 4, 3)
    exact = run(module, x.bfloat16().float(), *route)
    found = run(module, x.bfloat16(), *route)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())


def test_a_reload_reaches_the_cpu(tmp_path: Path, driver: FakeDriver) -> None:
    """In the memory where graphs have it."""
    layer = random_layer(3, 128, 128, bias=True)
    pack = open_pack(tmp_path, stored(layer))
    module = build(pack, layer, resident=frozenset({1}), side=side)
    load(module, stored(layer))
    x, route = inputs(3, 128), random_routing(3, 3, 2)
    run(module, x, *route)
    for name in ("w13_svh", "w2_suh", "w2_bias"):
        layer.tensors[name] *= 2
    load(module, stored(layer))
    assert close(run(module, x, *route), torch.from_numpy(layer.oracle(x, *route)).float())


@pytest.mark.parametrize(
    ("processors", "wanted", "rank", "ranks", "expected"),
    [
        (16, None, 0, 1, (15, None)),
        (16, 4, 0, 1, (4, None)),
        (16, 64, 0, 1, (64, None)),
        (1, None, 0, 1, (1, None)),
        (16, None, 0, 2, (7, [1, 2, 3, 4, 5, 6])),
        (16, None, 1, 2, (7, [8, 9, 10, 11, 12, 13])),
        (3, None, 1, 2, (1, [])),
        (1, None, 3, 4, (1, None)),
        (16, 5, 1, 2, (5, None)),
    ],
)
def test_ranks_divide_the_processors(
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    wanted: int | None,
    rank: int,
    ranks: int,
    expected: tuple[int, list[int] | None],
) -> None:
    monkeypatch.setattr(expert_tiers, "allowed_set", lambda: set(range(processors)))
    assert cpu_threads(wanted, rank, ranks) == expected


@pytest.mark.slow
def test_an_engine_serves_with_experts_on_the_cpu(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "cpu")
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", "0.0003")
    ids, logits = golden_logits(QWEN)
    with engine(PACKS / QWEN) as llm:
        found = logits_of(llm, ids)
    assert relative_error(found[:40], logits[:40]) < 1e-3
    tiers = runtime_diagnostics()["models"][-1]["tiers"]
    assert tiers["tier"] == "cpu" and tiers["gpu_bytes"] and tiers["host_bytes"]
    assert any(call.startswith("host") for call in driver.calls)
