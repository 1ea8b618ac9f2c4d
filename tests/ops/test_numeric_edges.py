"""Activations at the edges of the number formats, on every CPU backend: they touch their own rows only."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.ops.cpu_cases import Layer, needs_library, relative_error, whole
from vllm_exl3.cpu import backend
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.pack.stored import Codebook

pytestmark = needs_library

WIDTH = 384
KINDS = [(Codebook.MUL1, 6), (Codebook.MCG, 8), (Codebook.INST3, 4)]
EDGES = [0.0, 1e-40, 1e-30, 1e-8, 1e4, 1e30, math.inf, -math.inf, math.nan]
BOUND = 5e-4


@pytest.fixture(params=KINDS, ids=lambda kind: kind[0].label)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(whole(*request.param, WIDTH, 256), seed=3, bias=torch.float32)


def run(layer: Layer, x: torch.Tensor, function: Callable[..., torch.Tensor] = backend.linear) -> torch.Tensor:
    return function(x, *layer.tensors(), layer.bias, layer.layout)


@pytest.mark.parametrize("rows", [3, 40])
def test_a_row_touches_only_itself(isa: str, layer: Layer, rows: int) -> None:
    x = torch.randn(rows, WIDTH)
    layer.bias = None  # beside which a small row's products would not be seen
    usual = run(layer, x)
    assert usual.isfinite().all()
    for edge in EDGES:
        for row in (0, rows - 1):
            changed = x.clone()
            changed[row] *= edge if edge != math.inf else 1
            if math.isinf(edge) or math.isnan(edge):
                changed[row, 5] = edge
            found = run(layer, changed)
            others = [other for other in range(rows) if other != row]
            assert torch.equal(found[others], usual[others]), (edge, row)
            if not math.isfinite(edge):
                assert not found[row].isfinite().any(), (edge, row)
            elif edge == 0:
                assert (found[row] == 0).all()
            elif edge < 1e-37:  # a subnormal number has few bits, or counts as zero
                assert found[row].abs().max() <= 2 * np.abs(layer.expected(changed[row : row + 1])).max()
            else:
                assert relative_error(found[row : row + 1], layer.expected(changed[row : row + 1])) <= BOUND, (
                    edge,
                    row,
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_give_what_their_copies_give(isa: str, layer: Layer, dtype: torch.dtype) -> None:
    base = torch.randn(9, 2 * WIDTH).to(dtype)
    views = {
        "columns": base[:, 7 : 7 + WIDTH],
        "every other row": base[::2, :WIDTH],
        "one row for all": base[2:3, :WIDTH].expand(5, WIDTH),
        "transposed": torch.randn(WIDTH, 5).to(dtype).t(),
        "narrower": base[:4, :300],
        "none": base[:0, :WIDTH],
        "of every other column": base[:, ::2],
    }
    for name, view in views.items():
        found = run(layer, view)
        assert found.shape == (view.shape[0], 256) and torch.equal(found, run(layer, view.contiguous().clone())), name


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("kind", ["spikes", "alternating", "growing", "one value"])
def test_adversarial_activations_against_float64(isa: str, layer: Layer, kind: str, rows: int) -> None:
    x = torch.randn(rows, WIDTH)
    column = torch.arange(WIDTH)
    if kind == "spikes":
        x *= 1e-2
        x[:, ::128] = 1000.0
    elif kind == "alternating":
        x = torch.where(column % 2 == 0, 1.0, -1.0).expand(rows, WIDTH) * (1 + torch.arange(rows)[:, None])
    elif kind == "growing":
        x = x * torch.exp2((column // 128) * 8.0)
    else:
        x = torch.full((rows, WIDTH), 3.0)
    assert relative_error(run(layer, x), layer.expected(x)) <= BOUND


def test_the_reference_keeps_rows_apart_too(layer: Layer) -> None:
    x = torch.randn(6, WIDTH)
    usual = run(layer, x, linear_reference)
    for edge in (math.nan, math.inf, 1e30):
        changed = x.clone()
        changed[4, 5] = edge
        found = run(layer, changed, linear_reference)
        others = [0, 1, 2, 3, 5]
        assert torch.equal(found[others], usual[others])
        assert edge == 1e30 or not found[4].isfinite().any()
