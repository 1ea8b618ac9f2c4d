"""Random MoE layers on the GPU in the op's layout, and their float64 mathematics by another route than the kernels'.

The oracle decodes with `vllm_exl3.ops.trellis` in PyTorch and knows no grouping: an expert's dense matrices see every
token, and a dense matrix of routing weights picks what counts.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_exl3.ops.activation import activate
from vllm_exl3.ops.experts import Projection, pack_table, projection_kinds
from vllm_exl3.ops.trellis import decode, hadamard
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.expert_layout import lay_out_experts

Kind = tuple[float, int]
MUL1, MCG, INST3 = (int(codebook) for codebook in (Codebook.MUL1, Codebook.MCG, Codebook.INST3))


@dataclass
class GpuLayer:
    """One layer's flat tensors on the GPU, and what the op needs to know of them.

    Attributes:
        hidden: channels that enter and leave.
        intermediate: channels between the projections, before padding.
        projections: of every expert, in table order.
        tensors: the op's eight weight arguments.
        activation: the op's name and numbers.
        table: the op's table, on the GPU.
    """

    hidden: int
    intermediate: int
    projections: list[list[Projection]]
    tensors: dict[str, torch.Tensor | None]
    activation: tuple[str, float, float, float]
    table: torch.Tensor

    def arguments(
        self, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None = None, on_input: bool = False
    ) -> tuple[Any, ...]:
        """The op's arguments after ``x``, without the layer class."""
        kinds = projection_kinds(self.projections)
        tensors = self.tensors.values()
        return (weights, ids, expert_map, *tensors, self.table, kinds, self.intermediate, *self.activation, on_input)

    def share_scales(self) -> None:
        """Give gate and up of every expert the same input scales, as the loaders record it: one offset for both."""
        for index, (gate, up, *rest) in enumerate(self.projections):
            self.projections[index] = [gate, _with_suh(up, gate.suh), *rest]
        self.table = pack_table(self.projections).cuda()

    def oracle(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, on_input: bool = False) -> torch.Tensor:
        """The layer in float64; experts are decoded one at a time."""
        rows, out = x.double(), torch.zeros(len(x), self.hidden, dtype=torch.float64, device="cuda")
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            route = torch.where(ids == expert, weights.double(), 0).sum(dim=1, keepdim=True)
            inputs = rows * route if on_input else rows
            values = self.expert(expert, inputs)
            out += values * (route != 0) if on_input else values * route
        return out

    def expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows through one expert, in float64."""
        *first, down = self.projections[expert]
        inner = torch.cat([self._project(part, "w13", rows, self.intermediate) for part in first], dim=1)
        return self._project(down, "w2", activate(self.activation[0], inner, *self.activation[1:]), self.hidden)

    def _project(self, part: Projection, name: str, rows: torch.Tensor, outputs: int) -> torch.Tensor:
        trellis, suh, svh, bias = (self.tensors[f"{name}_{leaf}"] for leaf in ("trellis", "suh", "svh", "bias"))
        assert trellis is not None and suh is not None and svh is not None
        words = trellis[part.trellis : part.trellis + part.trellis_words].view(part.trellis_shape)
        weight = decode(words, part.half_bits, part.codebook).double()
        scaled = torch.nn.functional.pad(rows, (0, part.in_features - rows.shape[1]))
        scaled = hadamard(scaled * suh[part.suh : part.suh + part.in_features].double())
        values = hadamard(scaled @ weight) * svh[part.svh : part.svh + part.out_features].double()
        return values[:, :outputs] if bias is None else values[:, :outputs] + bias[part.bias : part.bias + outputs]


def _with_suh(part: Projection, suh: int) -> Projection:
    values = {name: getattr(part, name) for name in Projection.__dataclass_fields__}
    return Projection(**{**values, "suh": suh})


def random_layer(
    experts: int,
    hidden: int,
    intermediate: int,
    kinds: Sequence[Kind],
    *,
    gated: bool = True,
    bias: bool = False,
    activation: tuple[str, float, float, float] = ("swiglu", 1.0, 0.0, math.inf),
    seed: int = 0,
) -> GpuLayer:
    """A layer whose every projection takes its own kind, in turn, and its own random contents."""
    generator = torch.Generator("cuda").manual_seed(seed)
    projections, sizes = lay_out_experts(experts, hidden, intermediate, kinds, gated=gated, bias=bias)

    def scales(size: int, magnitude: float) -> torch.Tensor:
        sign = torch.randint(0, 2, (size,), generator=generator, device="cuda") * 2 - 1
        return (sign * (0.5 + 1.5 * torch.rand(size, generator=generator, device="cuda")) * magnitude).half()

    tensors: dict[str, torch.Tensor | None] = {}
    for name, first in (("w13", projections[0][0]), ("w2", projections[0][-1])):
        words, suh, svh, biases = sizes[name]
        tensors[f"{name}_trellis"] = torch.randint(
            -(1 << 15), 1 << 15, (words,), generator=generator, device="cuda", dtype=torch.int16
        )
        tensors[f"{name}_suh"], tensors[f"{name}_svh"] = scales(suh, first.in_features**-0.5 / 1.2), scales(svh, 1.0)
        tensors[f"{name}_bias"] = torch.randn(biases, generator=generator, device="cuda") if bias else None
    return GpuLayer(hidden, intermediate, projections, tensors, activation, pack_table(projections).cuda())


@functools.cache
def every_kind() -> tuple[Kind, ...]:
    """Every rate with every codebook that has it."""
    whole = [(float(bits), codebook) for bits in range(1, 9) for codebook in (MUL1, MCG, INST3)]
    return (*whole, (1.5, MUL1), (2.5, MUL1), (3.5, MUL1))
