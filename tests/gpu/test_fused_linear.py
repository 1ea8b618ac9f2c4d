"""Norms and activations in the rotation of a linear, on a GPU with wgmma: against float64, alone and in graphs."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from vllm_exl3 import env
from vllm_exl3.cuda import fused_linear
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops import backends
from vllm_exl3.ops.fused_linear import FUSED_ROWS, Layer
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards

EPSILON = 1e-5
LAYERS = {
    "qkv": tuple(Shard(8, 2, 4096, out, 0, out) for out in (4096, 1024, 1024)),
    "down": (Shard(8, 2, 14336, 4096, 0, 4096),),
    "two rates": (Shard(6, 2, 2048, 4096, 0, 4096),),
    "wide input": (Shard(8, 2, 18432, 4096, 0, 4096),),
    "cropped": (Shard(8, 2, 4096, 4096, 0, 4000), Shard(8, 2, 4096, 4096, 64, 4000)),
}
WIDTHS = {"cropped": 4092}


def reference(values: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The linear of float64 inputs, in float32 arithmetic of decoded weights."""
    return linear_reference(values.float(), layer.trellis, layer.suh, layer.svh, None, layer.shards)


def layer_of(shards: tuple[Shard, ...], seed: int) -> Layer:
    parts = [random_weights(shard, 1) for shard in shards]
    trellis, suh, svh = (torch.cat([part[i].flatten() for part in parts]) for i in range(3))
    return Layer(trellis, suh, svh, None, tuple(pack_shards(list(shards))), "test")


def normed(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    total = x.double() + (0.0 if residual is None else residual.double())
    return total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + EPSILON) * weight.double()


def product(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.fixture(params=["default", "fast"])
def bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of the relative error, in the default arithmetic and in the fast one."""
    monkeypatch.setenv(env.PRECISION.name, request.param)
    fused_linear._serves.cache_clear()
    return 3e-2 if request.param == "fast" else 3e-3


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_float64(name: str, dtype: torch.dtype, bound: float) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    torch.manual_seed(seed)
    shards, layer = LAYERS[name], layer_of(LAYERS[name], seed)
    width = WIDTHS.get(name, shards[0].in_features)
    assert fused_linear.serves(layer.shards, width, dtype)
    weight = (torch.rand(width, device="cuda") + 0.5).to(dtype)
    for rows in (FUSED_ROWS.start, 16, 33, 64, 100, FUSED_ROWS.stop - 1):
        sizes = 10.0 ** torch.randint(-2, 1, (rows, 1), device="cuda")
        x = (torch.randn(rows, 2 * width + 8, device="cuda") * sizes).to(dtype)
        residual = torch.randn(rows, width, device="cuda").to(dtype)
        half = x[:, :width]
        found, total = fused_linear.rms_norm(half, residual, weight, EPSILON, layer)
        _close(found, reference(normed(half, residual, weight), layer), bound, f"{name} {rows} {seed}")
        assert torch.equal(total, (half.float() + residual.float()).to(dtype))
        found, total = fused_linear.rms_norm(half, None, weight, EPSILON, layer)
        assert total is None
        _close(found, reference(normed(half, None, weight), layer), bound, f"{name} {rows} {seed}")
        both = x[:, : 2 * width]
        found = fused_linear.silu_and_mul(both, layer)
        _close(found, reference(product(both), layer), bound, f"{name} {rows} {seed}")


def _close(found: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    error = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    assert (error <= bound).all(), f"{what}: {error.max().item():.2e} of {bound}"


def test_rows_do_not_depend_on_others_and_rows_without_numbers_stay_alone() -> None:
    torch.manual_seed(7)
    layer, width = layer_of(LAYERS["qkv"], 7), 4096
    weight = torch.rand(width, device="cuda").bfloat16()
    x, residual = (torch.randn(40, width, device="cuda").bfloat16() for _ in range(2))
    before = fused_linear.rms_norm(x, residual, weight, EPSILON, layer)[0]
    x[5, 9], x[6] = float("nan"), 0.0
    residual[6] = 0.0
    after = fused_linear.rms_norm(x, residual, weight, EPSILON, layer)[0]
    assert after[5].isnan().all() and (after[6] == 0).all()
    others = [row for row in range(40) if row not in (5, 6)]
    assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_in_a_graph(rows: int) -> None:
    """Layers one after the other, as in a model: what one writes, the next reads early."""
    torch.manual_seed(rows)
    up, down = layer_of((Shard(8, 2, 4096, 8192, 0, 8192),) * 2, 1), layer_of((Shard(8, 2, 8192, 4096, 0, 4096),), 2)
    weight = torch.rand(4096, device="cuda").bfloat16()
    x, residual = (torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(2))

    def model(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(4):
            y, residual = torch.ops.vllm_exl3.add_rms_norm_linear(x, residual, weight, EPSILON, *_arguments(up))
            x = torch.ops.vllm_exl3.silu_and_mul_linear(y, *_arguments(down)) * 1e-3
        return x, residual

    backends.reset_calls()
    eager = model(x, residual)
    assert backends.calls() == {("linear", "native", "test"): 8}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(x, residual)
    for _ in range(5):
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


def _arguments(layer: Layer) -> tuple[Any, ...]:
    return layer.trellis, layer.suh, layer.svh, layer.bias, list(layer.shards), layer.layer_class


WRONG: dict[str, Callable[[torch.Tensor, Layer], Any]] = {
    "norm_weight: found": lambda x, layer: fused_linear.rms_norm(x, None, x[0, :-4].contiguous(), 1e-5, layer),
    "norm_weight: found torch.float32": lambda x, layer: fused_linear.rms_norm(x, None, x[0].float(), 1e-5, layer),
    "residual: found": lambda x, layer: fused_linear.rms_norm(x, x[:-1], x[0], 1e-5, layer),
    "x: found torch.float32": lambda x, layer: fused_linear.silu_and_mul(x.float(), layer),
}


@pytest.mark.parametrize("message", WRONG)
def test_misuse_is_refused(message: str) -> None:
    x = torch.randn(16, 4096, device="cuda").bfloat16()
    with pytest.raises(ValueError, match=message):
        WRONG[message](x, layer_of(LAYERS["qkv"], 3))
