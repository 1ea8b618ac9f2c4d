"""Where each expert's projections lie in the flat tensors of a MoE layer, and how each is coded.

A layer holds ``w13`` (gate and up of every local expert, expert by expert) and ``w2`` (down). Bit
rate and codebook may differ from expert to expert and from projection to projection, so kernels read
them, with the offsets, from one integer table that lives on the tensors' device.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import TILE

__all__ = [
    "TABLE_COLUMNS",
    "Projection",
    "pack_table",
    "projection_kinds",
    "share_input_scales",
    "shift_trellises",
    "unpack_expert",
]


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of one expert, as this rank holds it: a row of the table.

    Attributes:
        trellis: offset of its tiles ``[in/16, out/16, 16·K]`` in the flat trellis, in int16 words.
        suh: offset of its ``[in]`` input scales.
        svh: offset of its ``[out]`` output scales.
        bias: offset of its bias, as long as the outputs it returns, or -1.
        half_bits: 2·K.
        codebook: a `Codebook` value.
        in_features: stored input channels, a multiple of 128.
        out_features: stored output channels, a multiple of 128.
    """

    trellis: int
    suh: int
    svh: int
    bias: int
    half_bits: int
    codebook: int
    in_features: int
    out_features: int

    @property
    def trellis_shape(self) -> tuple[int, int, int]:
        """``[in/16, out/16, 16·K]`` in int16 words."""
        return self.in_features // TILE, self.out_features // TILE, self.half_bits * 8

    @property
    def trellis_words(self) -> int:
        """int16 words of its tiles."""
        rows, columns, words = self.trellis_shape
        return rows * columns * words

    def shard(self, outputs: int) -> Shard:
        """The same as the linear op knows it, returning its first ``outputs`` channels."""
        return Shard(self.half_bits, self.codebook, self.in_features, self.out_features, 0, outputs)


_COLUMNS = [field.name for field in fields(Projection)]
TABLE_COLUMNS = len(_COLUMNS)
"""Integers of a row of the table."""


def pack_table(experts: Sequence[Sequence[Projection]]) -> torch.Tensor:
    """The table: int64 ``[experts, projections, 8]`` on the CPU, a row's columns as in `Projection`."""
    rows = [[astuple(projection) for projection in expert] for expert in experts]
    projections = len(rows[0]) if rows else 0
    # On the host whatever the default device is: vLLM builds models under the GPU's, in memory that sleeping discards.
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), projections, TABLE_COLUMNS)


def share_input_scales(table: torch.Tensor, suh: torch.Tensor) -> torch.Tensor:
    """The table for scales that are loaded: where an expert's gate and up have equal ones, up is given gate's offset.

    Kernels then transform the expert's input once. One read back from the scales' device.

    Args:
        table: as `pack_table` makes it, on the CPU; not changed.
        suh: the layer's flat input scales of gate and up, expert by expert.
    """
    if table.shape[1] < 3:
        return table
    gate, up = suh.view(table.shape[0], 2, -1).unbind(1)
    equal = (gate == up).all(dim=1).cpu()
    shared, column = table.clone(), _COLUMNS.index("suh")
    shared[:, 1, column] = torch.where(equal, table[:, 0, column], table[:, 1, column])
    return shared


def shift_trellises(table: torch.Tensor, experts: Sequence[int], first: int, down: int) -> torch.Tensor:
    """The table for experts whose trellises lie elsewhere than in the flat tensors that the op is given.

    Kernels add offsets of 64 bits to a tensor's address, so an offset may lead to any memory that they can read.

    Args:
        table: as `pack_table` makes it, on the CPU; not changed.
        experts: rows of those experts.
        first: what is added to the offsets of gate and up, in int16 words.
        down: what is added to the offsets of down.
    """
    shifted, rows = table.clone(), list(experts)
    column = _COLUMNS.index("trellis")
    shifted[rows, :-1, column] += first
    shifted[rows, -1, column] += down
    return shifted


def projection_kinds(experts: Sequence[Sequence[Projection]]) -> list[int]:
    """Which codes occur: projection index, 2·K and codebook of each, flat and sorted.

    The host knows them without reading the table back from a device, and can choose kernels by them.
    """
    kinds = {
        (index, projection.half_bits, projection.codebook)
        for expert in experts
        for index, projection in enumerate(expert)
    }
    return [value for kind in sorted(kinds) for value in kind]


def unpack_expert(row: Sequence[Sequence[int]]) -> list[Projection]:
    """The projections of one expert from its part of the table."""
    return [Projection(*values) for values in row]
