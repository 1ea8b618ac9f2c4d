"""Activations between an expert's first and second projection, in plain PyTorch.

Names are this package's own; the serving side maps vLLM's to them. The three numbers mean what
`ACTIVATIONS` says of each name, and are passed to kernels as they are.

Made of torch's exp, erf and tanh: on CPUs its sigmoid, SiLU and GELU give the same number other bits at the end of a
tensor than in its middle, so that a token's result would depend on the tokens beside it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

__all__ = ["ACTIVATIONS", "Activation", "activate"]

_Function = Callable[[torch.Tensor, torch.Tensor, float, float, float], torch.Tensor]


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        gated: whether it takes gate and up; an un-gated one takes up alone.
        function: ``(gate, up, alpha, beta, limit)`` to the activated tensor; un-gated ones ignore gate.
    """

    gated: bool
    function: _Function


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(math.sqrt(0.5) * x))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    if limit != math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha == 1 and beta == 0:
        return _silu(gate) * up
    return gate * _sigmoid(alpha * gate) * (up + beta)


def _swiglu_step(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    return _silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _situ(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    gate = alpha * torch.tanh(gate / alpha) * _sigmoid(gate)
    return gate * (beta * torch.tanh(up / beta) if beta > 0 else up)


ACTIVATIONS: dict[str, Activation] = {
    # g·σ(alpha·g)·(u + beta), g at most limit and u within ±limit: SiLU is alpha 1, beta 0, no limit
    "swiglu": Activation(True, _swiglu),
    # the gate is limited after its SiLU
    "swiglu_step": Activation(True, _swiglu_step),
    # alpha·tanh(g/alpha)·σ(g)·u, u softly limited to ±beta where beta > 0
    "situ": Activation(True, _situ),
    "gelu": Activation(True, lambda gate, up, *_: _gelu(gate) * up),
    "gelu_tanh": Activation(True, lambda gate, up, *_: _gelu_tanh(gate) * up),
    "silu_ungated": Activation(False, lambda gate, up, *_: _silu(up)),
    "gelu_ungated": Activation(False, lambda gate, up, *_: _gelu(up)),
    "gelu_tanh_ungated": Activation(False, lambda gate, up, *_: _gelu_tanh(up)),
    "relu2_ungated": Activation(False, lambda gate, up, *_: functional.relu(up).square()),
}
"""Every activation that the MoE op knows. A limit of infinity means none."""


def activate(name: str, hidden: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """Apply an activation.

    Args:
        name: a key of `ACTIVATIONS`.
        hidden: ``[rows, 2·I]``, gate then up, for a gated one, else ``[rows, I]``.
        alpha: first number of the activation.
        beta: second number of the activation.
        limit: where it clips; infinity for nowhere.

    Returns:
        ``[rows, I]`` in the dtype of ``hidden``.
    """
    kind = ACTIVATIONS[name]
    gate, up = hidden.chunk(2, dim=-1) if kind.gated else (hidden, hidden)
    return kind.function(gate, up, alpha, beta, limit)
