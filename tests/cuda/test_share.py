"""The CPU's share of experts as work of streams: what is enqueued in which order, and what comes back."""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from tests.cuda.share_driver import DONE, MAIN, READY, SIDE, FakeDriver, playing
from tests.ops.moe_layers import MoELayer, random_layer, random_routing
from vllm_exl3.cpu import library
from vllm_exl3.cuda.driver import DriverError
from vllm_exl3.cuda.share import CpuShare, SideStream
from vllm_exl3.ops.moe import MoECall, moe_reference
from vllm_exl3.pack.stored import Codebook

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

MIXED = [(2, Codebook.MUL1), (4, Codebook.MCG), (3, Codebook.INST3)]
ORDER = [
    f"record {READY:#x} {MAIN}",
    f"wait {SIDE} {READY:#x}",
    f"copy {SIDE}",
    f"copy {SIDE}",
    f"copy {SIDE}",
    f"host {SIDE}",
    f"copy {SIDE}",
    f"record {DONE:#x} {SIDE}",
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with playing(monkeypatch) as fake:
        yield fake


def share_of(layer: MoELayer, local: list[int], rows: int = 8, top_k: int = 2, threads: int = 2) -> CpuShare:
    side = SideStream(threads, None, rows, layer.hidden, top_k)
    call = MoECall(*layer.arguments(*random_routing(1, len(layer.projections), 1)))
    return CpuShare(side, call, torch.tensor(local, dtype=torch.int32))


def expected(layer: MoELayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return moe_reference(x.float(), *layer.arguments(weights, ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_a_share_is_the_sum_over_its_experts(driver: FakeDriver, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    """The model has six experts, of which the CPU knows three, in another order."""
    layer = random_layer(3, 256, 128, MIXED, bias=True)
    local = torch.tensor([-1, 2, -1, 0, 1, -1])
    share = share_of(layer, local.tolist())
    for tokens in (1, 5, 8):
        x = torch.randn((tokens, 256), generator=torch.Generator().manual_seed(tokens)).to(dtype)
        weights, ids = random_routing(tokens, 6, 2)
        ids = ids.to(id_dtype)
        ids[0, 0] = -1
        if tokens > 1:
            ids[1, 1] = 6 if id_dtype == torch.int32 else 1 << 40
        known = torch.where((ids >= 0) & (ids < 6), local[ids.clamp(0, 5)], -1)
        reply = share.enqueue(x, weights, ids, MAIN)
        share.join(MAIN)
        assert driver.calls == [*ORDER, f"wait {MAIN} {DONE:#x}"]
        driver.calls.clear()
        wanted = expected(layer, x, weights, known)
        assert reply.dtype == torch.float32
        torch.testing.assert_close(reply, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
    assert share.runs == 3


def test_nothing_is_computed_before_the_stream_gets_there(driver: FakeDriver) -> None:
    """And what is computed then is of what the memory holds then, as a graph that is replayed needs it."""
    layer = random_layer(2, 128, 128, MIXED)
    share = share_of(layer, [0, 1])
    x, (weights, ids) = torch.randn(3, 128), random_routing(3, 2, 2)
    driver.immediate = False
    reply = share.enqueue(x, weights, ids, MAIN)
    assert share.runs == 0
    x.mul_(2)
    share.join(MAIN)
    assert share.runs == 1
    wanted = expected(layer, x, weights, ids)
    torch.testing.assert_close(reply, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))


def test_copies_of_a_request_live_until_they_are_joined(driver: FakeDriver) -> None:
    """Else the stream would give their memory to the GPU's share, which runs meanwhile."""
    layer = random_layer(2, 128, 128, MIXED)
    share = share_of(layer, [0, 1])
    x, (weights, ids) = torch.randn(3, 256)[:, ::2], random_routing(3, 2, 2)
    driver.immediate = False
    reply = share.enqueue(x, weights.double(), ids, MAIN)
    filler = [torch.full((3, 128), torch.nan) for _ in range(64)]
    share.join(MAIN)
    wanted = expected(layer, x, weights, ids)
    torch.testing.assert_close(reply, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
    assert filler and not share._held


def test_layers_share_the_memory_of_a_request(driver: FakeDriver) -> None:
    """One after another, as streams order them; of one size a layer has one structure, which graphs may hold."""
    layers = [random_layer(2, 128, 128, MIXED, seed=seed) for seed in (1, 2)]
    side = SideStream(1, None, 4, 128, 2)
    shares = [
        CpuShare(side, MoECall(*layer.arguments(*random_routing(1, 2, 1))), torch.tensor([0, 1], dtype=torch.int32))
        for layer in layers
    ]
    x, route = torch.randn(4, 128), random_routing(4, 2, 2)
    for _ in range(2):
        for layer, share in zip(layers, shares, strict=True):
            reply = share.enqueue(x, *route, MAIN)
            wanted = expected(layer, x, *route)
            torch.testing.assert_close(reply, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
    assert [len(share._prepared) for share in shares] == [1, 1] and [share.runs for share in shares] == [2, 2]


@pytest.mark.parametrize("name", ["record", "wait", "copy", "host"])
def test_a_driver_that_refuses_is_an_error(driver: FakeDriver, name: str) -> None:
    share = share_of(random_layer(2, 128, 128, MIXED), [0, 1])
    driver.failing = name
    with pytest.raises(DriverError, match="status is 700"):
        share.enqueue(torch.randn(1, 128), *random_routing(1, 2, 1), MAIN)


def test_another_context_is_made_the_current_one(driver: FakeDriver) -> None:
    share = share_of(random_layer(2, 128, 128, MIXED), [0, 1])
    driver.context = 0x2000
    share.enqueue(torch.randn(1, 128), *random_routing(1, 2, 1), MAIN)
    assert driver.calls == ["push 0x1000", *ORDER, "pop "]


def test_a_failure_on_the_cpu_gives_no_numbers_and_is_told_at_the_next_call(driver: FakeDriver) -> None:
    share = share_of(random_layer(2, 128, 128, MIXED), [0, 1])
    x, route = torch.randn(2, 128), random_routing(2, 2, 2)
    share.enqueue(x, *route, MAIN)
    (prepared,) = share._prepared.values()
    prepared.struct.call.activation = 99
    reply = share.enqueue(x, *route, MAIN)
    assert reply.isnan().all()
    with pytest.raises(DriverError, match="experts on the CPU"):
        share.enqueue(x, *route, MAIN)


def test_without_a_driver_there_is_no_share(driver: FakeDriver) -> None:
    share = share_of(random_layer(2, 128, 128, MIXED), [0, 1])
    nothing = (ctypes.c_void_p * 7)()
    library.library().exl3_set_share_driver(ctypes.addressof(nothing))
    with pytest.raises(DriverError, match="experts on the CPU"):
        share.enqueue(torch.randn(1, 128), *random_routing(1, 2, 1), MAIN)
