"""What a call of the MoE op tells its launches, on a device that only takes notes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_exl3.cuda import moe
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.moe_geometry import ACTIVATION_KINDS, MoeArgs
from vllm_exl3.cuda.moe_timing import ExpertShape, RandomExperts, random_experts, random_routing
from vllm_exl3.pack.stored import Codebook

SHAPE = ExpertShape(experts=6, top_k=2, hidden=200, intermediate=300)


@dataclass
class NotingDevice:
    """Stands in for `runtime.Device`, and for its kernels; keeps a copy of what each launch was told."""

    limits: GpuLimits = field(default_factory=lambda: GpuLimits("sm_90a", 132, 232448))
    told: list[MoeArgs] = field(default_factory=list)
    kernels: list[Instance] = field(default_factory=list)

    def kernel(self, instance: Instance) -> "NotingDevice":
        self.kernels.append(instance)
        return self

    def allow_shared(self, size: int) -> None:
        assert size <= self.limits.shared_memory

    def launch(self, grid: Any, threads: int, shared: int, stream: int, arguments: list[Any], *_: Any) -> None:
        assert stream == 7 and min(grid) > 0
        self.told.append(MoeArgs.from_buffer_copy(arguments[0]))

    def windows(self) -> list[MoeArgs]:
        """The first launch of each window."""
        return [told for index, told in enumerate(self.told) if index == 0 or told.x != self.told[index - 1].x]


@pytest.fixture
def device(in_place_of_the_device: Callable[[NotingDevice], NotingDevice]) -> NotingDevice:
    return in_place_of_the_device(NotingDevice())


@pytest.fixture(scope="module")
def layer() -> RandomExperts:
    return random_experts(SHAPE, [(4.0, int(Codebook.MUL1))], "cpu")


def _arguments(
    layer: RandomExperts, tokens: int, ids: torch.dtype = torch.int32, weights: torch.dtype = torch.float32
) -> list[Any]:
    shares, chosen = random_routing(tokens, SHAPE.experts, SHAPE.top_k, 1, "cpu")
    return list(layer.arguments((shares.to(weights), chosen.to(ids))))


@pytest.mark.parametrize("tokens", [1, 5, 12, 13])
@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_windows_follow_one_another(
    device: NotingDevice, layer: RandomExperts, path: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_NATIVE_MOE_MAX_ROWS", "100" if path == "decode" else "0")
    monkeypatch.setenv("VLLM_EXL3_FUSED_TEMP_ROWS" if path == "decode" else "VLLM_EXL3_GROUPED_PREFILL_MAX_ROWS", "4")
    x, arguments = torch.zeros(tokens, 300, dtype=torch.bfloat16)[:, :200], _arguments(layer, tokens)
    out = moe.moe(x, *arguments)
    assert out.shape == (tokens, 200) and out.dtype == x.dtype
    windows = device.windows()
    assert [told.tokens for told in windows] == [4] * (tokens // 4) + [tokens % 4] * (tokens % 4 > 0)
    for index, told in enumerate(windows):
        assert (told.x, told.out) == (x[4 * index].data_ptr(), out[4 * index].data_ptr())
        assert (told.x_stride, told.out_stride, told.x_type, told.out_type) == (300, 200, 1, 1)
        assert told.ids == arguments[1][4 * index].data_ptr() and told.weights == arguments[0][4 * index].data_ptr()
    assert {bool(told.identity) for told in device.told} == {path == "decode"}
    assert {told.stage for told in device.told} == {0, 1}


def test_a_layer_is_told_as_it_is(device: NotingDevice, layer: RandomExperts) -> None:
    arguments = _arguments(layer, 3)
    arguments[-5:] = ["situ", 1.5, 0.25, 7.0, True]
    moe.moe(torch.zeros(3, 200), *arguments)
    told = device.told[0]
    assert (told.activation, told.alpha, told.beta, told.limit) == (ACTIVATION_KINDS.index("situ"), 1.5, 0.25, 7.0)
    assert (told.weight_on_input, told.top_k, told.experts, told.mapped, told.projections) == (1, 2, 6, 6, 3)
    assert told.table == layer.table.data_ptr() and told.expert_map == 0
    for stage, first in zip(told.stages, (0, 4), strict=True):
        trellis, suh, svh, bias = layer.weights[first : first + 4]
        assert trellis is not None and suh is not None and svh is not None and bias is None
        assert (stage.trellis, stage.suh, stage.svh) == (trellis.data_ptr(), suh.data_ptr(), svh.data_ptr())
        assert stage.bias == 0
    assert [(stage.in_width, stage.out_width) for stage in told.stages] == [(200, 300), (300, 200)]


@pytest.mark.parametrize(("ids", "wide"), [(torch.int32, 0), (torch.int64, 1), (torch.int16, 0), (torch.uint8, 0)])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_routings_come_in_any_integers_and_weights_in_any_floats(
    device: NotingDevice, layer: RandomExperts, ids: torch.dtype, wide: int, weights: torch.dtype
) -> None:
    arguments = _arguments(layer, 3, ids, weights)
    moe.moe(torch.zeros(3, 200), *arguments)
    told = device.told[0]
    assert told.wide_ids == wide
    assert (told.ids == arguments[1].data_ptr()) == (ids in (torch.int32, torch.int64))
    assert (told.weights == arguments[0].data_ptr()) == (weights == torch.float32)


def test_a_map_says_how_many_experts_there_are(device: NotingDevice, layer: RandomExperts) -> None:
    arguments = _arguments(layer, 3)
    arguments[2] = torch.tensor([-1, 0, 1, 2, 3, 4, 5, -1, -1], dtype=torch.int32)
    moe.moe(torch.zeros(3, 200), *arguments)
    told = device.told[0]
    assert (told.expert_map, told.experts, told.mapped) == (arguments[2].data_ptr(), 6, 9)


def test_no_tokens_and_no_experts_launch_nothing(device: NotingDevice, layer: RandomExperts) -> None:
    assert moe.moe(torch.zeros(0, 200), *_arguments(layer, 1)).shape == (0, 200)
    arguments = _arguments(layer, 3)
    table = 11
    assert torch.equal(arguments[table], layer.table)
    arguments[table] = layer.table[:0]
    out = moe.moe(torch.full((3, 200), math.nan), *arguments)
    assert torch.equal(out, torch.zeros(3, 200)) and not device.told


def test_columns_that_lie_apart_are_brought_together(device: NotingDevice, layer: RandomExperts) -> None:
    x = torch.zeros(200, 3).t()
    moe.moe(x, *_arguments(layer, 3))
    assert device.told[0].x != x.data_ptr() and device.told[0].x_stride == 200


@pytest.mark.parametrize(("weights", "ids"), [((3, 2), (2, 2)), ((2, 2), (2, 2)), ((3, 1), (3, 2)), ((6,), (6,))])
def test_a_routing_of_other_tokens_is_refused(
    device: NotingDevice, layer: RandomExperts, weights: tuple[int, ...], ids: tuple[int, ...]
) -> None:
    arguments = _arguments(layer, 3)
    arguments[:2] = torch.zeros(weights), torch.zeros(ids, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"routing of 3 tokens: found weights .* expected both as \[3, choices\]"):
        moe.moe(torch.zeros(3, 200), *arguments)
    assert not device.told


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_a_dtype_that_no_kernel_reads_is_named(device: NotingDevice, layer: RandomExperts, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"found {dtype}, expected"):
        moe.moe(torch.zeros(3, 200, dtype=dtype), *_arguments(layer, 3))
    assert not device.told
