"""Random MoE layers in the op's layout, and their float64 mathematics by another route.

The oracle decodes with the numpy codec and knows no grouping: every expert sees every token, and a
dense matrix of routing weights picks what counts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_exl3.ops.experts import Projection, pack_table, projection_kinds
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.expert_layout import lay_out_experts

Kind = tuple[float, Codebook]
Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu(alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf) -> Activation:
    def function(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * sigmoid(alpha * gate) * (up + beta)

    return function


@dataclass
class MoELayer:
    """One layer's flat tensors, and what the op needs to know of them.

    Attributes:
        hidden: channels that enter and leave.
        intermediate: channels between the projections, before padding.
        projections: of every expert, in table order.
        tensors: the op's eight weight arguments.
        activation: the op's name and numbers.
        function: the same in float64.
    """

    hidden: int
    intermediate: int
    projections: list[list[Projection]]
    tensors: dict[str, torch.Tensor | None]
    activation: tuple[str, float, float, float]
    function: Activation
    weights: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def arguments(
        self, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None = None, on_input: bool = False
    ) -> tuple[Any, ...]:
        """The op's arguments after ``x``, without the layer class."""
        kinds = projection_kinds(self.projections)
        table = pack_table(self.projections)
        return (
            weights,
            ids,
            expert_map,
            *self.tensors.values(),
            table,
            kinds,
            self.intermediate,
            *self.activation,
            on_input,
        )

    def oracle(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, on_input: bool = False) -> np.ndarray:
        """The layer in float64: every expert on every token, times a dense matrix of routing weights."""
        rows, out = x.double().numpy(), np.zeros((len(x), self.hidden))
        for expert in range(len(self.projections)):
            route = np.where(ids.numpy() == expert, weights.double().numpy(), 0).sum(axis=1, keepdims=True)
            if route.any():
                out += (
                    self.expert(expert, rows * route) * (route != 0) if on_input else self.expert(expert, rows) * route
                )
        return out

    def expert(self, expert: int, rows: np.ndarray) -> np.ndarray:
        """Rows through one expert."""
        down = len(self.projections[expert]) - 1
        first = [self.project(expert, index, rows, self.intermediate) for index in range(down)]
        return self.project(expert, down, self.function(first[0], first[-1]), self.hidden)

    def project(self, expert: int, index: int, rows: np.ndarray, outputs: int) -> np.ndarray:
        part = self.projections[expert][index]
        name = "w2" if index == len(self.projections[expert]) - 1 else "w13"
        values = rows @ self.weight(expert, index, name)[: rows.shape[1], :outputs]
        bias = self.tensors[f"{name}_bias"]
        return values if bias is None else values + bias[part.bias : part.bias + outputs].double().numpy()

    def weight(self, expert: int, index: int, name: str) -> np.ndarray:
        if (expert, index) not in self.weights:
            part = self.projections[expert][index]
            trellis, suh, svh = (self.tensors[f"{name}_{leaf}"] for leaf in ("trellis", "suh", "svh"))
            self.weights[expert, index] = codec.dense_weight(
                trellis[part.trellis : part.trellis + part.trellis_words].view(part.trellis_shape).numpy(),
                part.half_bits,
                Codebook(part.codebook),
                suh[part.suh : part.suh + part.in_features].numpy(),
                svh[part.svh : part.svh + part.out_features].numpy(),
            )
        return self.weights[expert, index]


def random_layer(
    experts: int,
    hidden: int,
    intermediate: int,
    kinds: Sequence[Kind] = ((3, Codebook.MUL1),),
    *,
    gated: bool = True,
    bias: bool = False,
    activation: tuple[str, float, float, float] = ("swiglu", 1.0, 0.0, math.inf),
    function: Activation | None = None,
    seed: int = 0,
) -> MoELayer:
    """A layer whose every projection takes its own kind, in turn, and its own random contents."""
    rng = np.random.default_rng(seed)
    projections, sizes = lay_out_experts(experts, hidden, intermediate, kinds, gated=gated, bias=bias)
    scales: dict[str, list[np.ndarray]] = {f"{name}_{leaf}": [] for name in sizes for leaf in ("suh", "svh")}
    for row in projections:
        for part in row:
            name = "w2" if part is row[-1] else "w13"
            rms = 1.0 if part.codebook == Codebook.MUL1 else 1.244
            inputs, outputs = part.in_features, part.out_features
            for leaf, width, scale in (("suh", inputs, inputs**-0.5 / rms), ("svh", outputs, 1.0)):
                signs = rng.choice([-1.0, 1.0], width)
                scales[f"{name}_{leaf}"].append(signs * rng.uniform(0.5, 2, width) * scale)
    tensors: dict[str, torch.Tensor | None] = {}
    for name in ("w13", "w2"):
        words = rng.integers(-(1 << 15), 1 << 15, sizes[name][0], dtype=np.int16)
        tensors[f"{name}_trellis"] = torch.from_numpy(words)
        for leaf in ("suh", "svh"):
            tensors[f"{name}_{leaf}"] = torch.from_numpy(np.concatenate(scales[f"{name}_{leaf}"]).astype(np.float16))
        values = rng.standard_normal(sizes[name][3]).astype(np.float32)
        tensors[f"{name}_bias"] = torch.from_numpy(values) if bias else None
    return MoELayer(hidden, intermediate, projections, tensors, activation, function or swiglu(*activation[1:]))


def random_routing(tokens: int, experts: int, top_k: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[tokens, top_k]`` that sum to one, and as many different experts."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand((tokens, experts), generator=generator).topk(top_k)
    return scores.values / scores.values.sum(dim=1, keepdim=True), scores.indices.int()
