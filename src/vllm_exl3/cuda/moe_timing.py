"""Timing of whole MoE blocks as they run when served: replayed CUDA graphs over one layer and many routings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_exl3.cuda import moe
from vllm_exl3.cuda.timing import bound_us, replayed
from vllm_exl3.ops.experts import pack_table, projection_kinds
from vllm_exl3.tools.expert_layout import lay_out_experts

__all__ = ["ExpertShape", "RandomExperts", "copies_for", "random_experts", "random_routing"]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A MoE layer with gates, SwiGLU and no biases.

    Attributes:
        experts: of the layer.
        top_k: experts that a token visits.
        hidden: channels that enter and leave.
        intermediate: channels between the projections.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def touched(self, tokens: int) -> float:
        """Experts that some token visits, on average over uniform routings."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)


@dataclass(frozen=True, slots=True)
class RandomExperts:
    """A layer of random weights.

    Attributes:
        shape: what it is like.
        weights: the op's eight weight arguments.
        table: the op's table.
        kinds: which codes occur, as the op takes them.
        nbytes: bytes of all trellises.
    """

    shape: ExpertShape
    weights: tuple[torch.Tensor | None, ...]
    table: torch.Tensor
    kinds: list[int]
    nbytes: int

    def arguments(self, route: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        """The op's arguments after ``x``, without the layer class."""
        numbers = self.kinds, self.shape.intermediate, "swiglu", 1.0, 0.0, math.inf, False
        return (*route, None, *self.weights, self.table, *numbers)

    def prepare(self) -> None:
        """Compile and load the kernels for any number of tokens."""
        shape = self.shape
        key = (tuple(self.kinds), shape.experts, shape.experts, shape.hidden, shape.intermediate)
        moe.prepare([key], torch.device("cuda", torch.cuda.current_device()))

    def us(self, tokens: int) -> float:
        """Median microseconds of one block; calls of a graph differ in their routing."""
        copies, shape = copies_for(tokens), self.shape
        x = torch.randn(tokens, shape.hidden, device=self.table.device, dtype=torch.bfloat16)
        calls = [
            self.arguments(random_routing(tokens, shape.experts, shape.top_k, seed, x.device)) for seed in range(copies)
        ]
        return replayed(lambda index: moe.moe(x, *calls[index]), copies)

    def limit_us(self, tokens: int) -> float:
        """`bound_us` of one block: visited weights, each read and decoded once, and every slot's products."""
        shape = self.shape
        share, count = shape.touched(tokens) / shape.experts, 3 * shape.hidden * shape.intermediate
        return bound_us(share * self.nbytes, share * shape.experts * count, 2 * tokens * shape.top_k * count)


def random_experts(shape: ExpertShape, kinds: Sequence[tuple[float, int]], device: str = "cuda") -> RandomExperts:
    """A layer whose projections take these (K, codebook) in turn, with input scales of their own."""
    projections, sizes = lay_out_experts(shape.experts, shape.hidden, shape.intermediate, kinds)
    weights: list[torch.Tensor | None] = []
    for name, first in (("w13", projections[0][0]), ("w2", projections[0][-1])):
        words, suh, svh, _ = sizes[name]
        weights.append(torch.randint(-(2**15), 2**15, (words,), device=device, dtype=torch.int16))
        weights.append((torch.randn(suh, device=device) * first.in_features**-0.5).half())
        weights += [torch.randn(svh, device=device).half(), None]
    nbytes = sum(2 * part.trellis_words for row in projections for part in row)
    table = pack_table(projections).to(device)
    return RandomExperts(shape, tuple(weights), table, projection_kinds(projections), nbytes)


def copies_for(tokens: int) -> int:
    """Calls of a graph: so many that few tokens do not find their experts in the L2."""
    return max(2, min(24, 256 // tokens))


def random_routing(
    tokens: int, experts: int, top_k: int, seed: int = 1, device: torch.device | str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A uniform routing: weights ``[tokens, top_k]`` that sum to one, and as many different experts."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.rand((tokens, experts), generator=generator, device=device).topk(top_k)
    return scores.values / scores.values.sum(dim=1, keepdim=True), scores.indices.int()
