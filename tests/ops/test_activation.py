"""Every activation of the MoE op against its definition in float64."""

import math

import numpy as np
import pytest
import torch

from tests.ops.moe_layers import Activation, gelu, gelu_tanh, sigmoid, swiglu
from vllm_exl3.ops.activation import ACTIVATIONS, activate

INF = math.inf

CASES: list[tuple[str, float, float, float, Activation]] = [
    ("swiglu", 1.0, 0.0, INF, lambda g, u: g * sigmoid(g) * u),
    ("swiglu", 1.0, 0.0, 1.0, lambda g, u: np.minimum(g, 1) * sigmoid(np.minimum(g, 1)) * np.clip(u, -1, 1)),
    ("swiglu", 1.0, 0.0, 10.0, swiglu(limit=10.0)),
    ("swiglu", 1.702, 1.0, 7.0, swiglu(1.702, 1.0, 7.0)),
    ("swiglu_step", 1.0, 0.0, 7.0, lambda g, u: np.minimum(g * sigmoid(g), 7) * np.clip(u, -7, 7)),
    ("situ", 2.0, 0.0, INF, lambda g, u: 2 * np.tanh(g / 2) * sigmoid(g) * u),
    ("situ", 2.0, 3.0, INF, lambda g, u: 2 * np.tanh(g / 2) * sigmoid(g) * 3 * np.tanh(u / 3)),
    ("gelu", 1.0, 0.0, INF, lambda g, u: gelu(g) * u),
    ("gelu_tanh", 1.0, 0.0, INF, lambda g, u: gelu_tanh(g) * u),
    ("silu_ungated", 1.0, 0.0, INF, lambda _, u: u * sigmoid(u)),
    ("gelu_ungated", 1.0, 0.0, INF, lambda _, u: gelu(u)),
    ("gelu_tanh_ungated", 1.0, 0.0, INF, lambda _, u: gelu_tanh(u)),
    ("relu2_ungated", 1.0, 0.0, INF, lambda _, u: np.maximum(u, 0) ** 2),
]


@pytest.mark.parametrize(("name", "alpha", "beta", "limit", "expected"), CASES)
def test_activation_is_its_definition(name: str, alpha: float, beta: float, limit: float, expected: Activation) -> None:
    rng = np.random.default_rng(0)
    gate, up = rng.uniform(-12, 12, (2, 64, 128))  # wide enough for every limit to clip
    hidden = np.concatenate([gate, up], axis=1) if ACTIVATIONS[name].gated else up
    result = activate(name, torch.from_numpy(hidden).float(), alpha, beta, limit)
    assert result.shape == up.shape
    np.testing.assert_allclose(result.numpy(), expected(gate, up), rtol=2e-5, atol=2e-5)


def test_every_activation_is_in_the_table() -> None:
    assert {name for name, *_ in CASES} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_element_s_bits_do_not_depend_on_what_is_beside_it(name: str) -> None:
    """Loops over tensors end with other instructions than they consist of, and threads cut them anywhere."""
    rows, width = 700, 129
    hidden = 4 * torch.randn((rows, (1 + ACTIVATIONS[name].gated) * width))
    whole = activate(name, hidden, 1.5, 0.5, 20.0)
    for row in range(0, rows, 7):
        assert torch.equal(activate(name, hidden[row : row + 1], 1.5, 0.5, 20.0)[0], whole[row])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_ends_of_the_range_are_values(name: str) -> None:
    """Where functions inside overflow, the activation does not."""
    hidden = torch.tensor([-3e38, -1e20, -200.0, 0.0, 200.0]).repeat(1 + ACTIVATIONS[name].gated)
    found = activate(name, hidden.view(1, -1), 1.0, 0.0, math.inf)[0]
    squares = name == "relu2_ungated" or ACTIVATIONS[name].gated
    np.testing.assert_allclose(found[:4], np.zeros(4), atol=1e-30)
    assert found[4] == (4e4 if squares and name != "situ" else 200)
