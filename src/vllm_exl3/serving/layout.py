"""Where every stored tensor of a fused vLLM layer lies in the layer's flat parameters.

vLLM builds one layer for q, k and v, or for gate and up, or for a tuple of outputs that one stored
tensor spans; tensor parallelism gives each rank a range of every output. A `Layout` turns that into
`Slot`s: which blocks of which stored tensor go where.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.stored import BLOCK, Codebook, StoredLinear, pad_to_block
from vllm_exl3.plan.partition import Piece, piece
from vllm_exl3.serving.fused import whole_outputs

__all__ = ["DenseSlot", "Layout", "Output", "Slot", "layer_outputs"]


@dataclass(frozen=True, slots=True)
class Output:
    """One logical output of a vLLM layer, such as k of a fused q/k/v.

    Attributes:
        total: output channels in the checkpoint.
        start: first of them on this rank.
        size: how many of them on this rank.
    """

    total: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of one EXL3 tensor, and where it begins in the layer's flat parameters.

    Attributes:
        part: index of the stored tensor among the layer's parts.
        linear: the stored tensor.
        piece: the blocks that this rank holds.
        trellis: offset in the flat ``trellis``, in int16 words.
        suh: offset in the flat ``suh``.
        svh: offset in the flat ``svh``.
    """

    part: int
    linear: StoredLinear
    piece: Piece
    trellis: int
    suh: int
    svh: int

    @property
    def shard(self) -> Shard:
        """What the ops need to know of it."""
        return Shard(
            self.linear.half_bits,
            int(self.linear.codebook),
            self.piece.row_size,
            self.piece.column_size,
            self.piece.crop_start,
            self.piece.crop_size,
        )


@dataclass(frozen=True, slots=True)
class DenseSlot:
    """Rows of a stored 16-bit ``weight`` inside an otherwise EXL3 layer.

    Attributes:
        part: index of the stored tensor among the layer's parts.
        start: first stored row on this rank.
        size: rows on this rank.
        row: where they begin in the layer's ``weight``.
    """

    part: int
    start: int
    size: int
    row: int


class Layout:
    """The slots of one layer on one rank.

    Args:
        where: the layer's name, for errors.
        parts: the stored tensors in the order of the layer's outputs.
        outputs: the layer's outputs.
        rows: first input channel on this rank, how many, and how many in all.

    Raises:
        Exl3PackError: the stored sizes do not fit the layer.
    """

    def __init__(
        self, where: str, parts: Sequence[Part], outputs: Sequence[Output], rows: tuple[int, int, int]
    ) -> None:
        self.where = where
        self.parts = tuple(parts)
        self.slots: list[Slot | DenseSlot] = []
        self.rows = rows
        self.part_of_output: list[int] = []
        self.logical_width: list[int] = []
        self._trellis_words = self._suh_size = self._svh_size = self._dense_rows = 0
        if len(self.parts) > len(outputs):
            raise Exl3PackError(
                found=f"{len(self.parts)} stored tensors ({', '.join(part.key for part in self.parts)})",
                expected=f"no more than the layer's outputs, of which it has {len(outputs)}",
                where=where,
                remedy="Without --model-impl transformers, vLLM builds a layer that takes them one by one.",
            )
        remaining = list(outputs)
        for index, part in enumerate(self.parts):
            covered = _take_covered(where, part, remaining, last=index == len(self.parts) - 1)
            self.part_of_output += [index] * len(covered)
            self.logical_width.append(sum(output.total for output in covered))
            for start, size in _ranges(covered):
                self._add(index, part, start, size)

    @property
    def exl3_slots(self) -> list[Slot]:
        """The slots that hold trellis tiles, in output order."""
        return [slot for slot in self.slots if isinstance(slot, Slot)]

    @property
    def dense_slots(self) -> list[DenseSlot]:
        """The slots that hold 16-bit weights, in output order."""
        return [slot for slot in self.slots if isinstance(slot, DenseSlot)]

    @property
    def shards(self) -> tuple[int, ...]:
        """The layout of the EXL3 slots as the ops take it."""
        return tuple(pack_shards(slot.shard for slot in self.exl3_slots))

    @property
    def input_width(self) -> int:
        """Channels of the input that the op gets."""
        return self.row_offset + self.rows[1]

    @property
    def row_offset(self) -> int:
        """Where this rank's inputs begin in the blocks of rows that it holds."""
        return self.rows[0] % BLOCK

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of the flat parameters: ``trellis`` words, ``suh``, ``svh``, and rows of ``weight``."""
        return {
            "trellis": self._trellis_words,
            "suh": self._suh_size,
            "svh": self._svh_size,
            "weight": self._dense_rows,
        }

    def markers(self, codebook: Codebook) -> list[int]:
        """Parts whose tensors carry this codebook's marker."""
        return [
            index
            for index, part in enumerate(self.parts)
            if part.linear is not None and part.linear.marker is not None and part.linear.codebook == codebook
        ]

    def part_for(self, shard_id: str | int | tuple[int, ...] | None) -> int:
        """The part that a checkpoint tensor belongs to, from the shard id that vLLM's loader passes.

        Raises:
            Exl3PackError: the id names no output of this layer.
        """
        if shard_id is None and len(self.parts) == 1:
            return 0
        index = shard_id[0] if isinstance(shard_id, tuple) else shard_id
        if isinstance(index, str):
            index = _NAMED_OUTPUTS.get(index)
        if index is None or not 0 <= index < len(self.part_of_output):
            raise Exl3PackError(
                found=f"a tensor for output {shard_id!r}",
                expected=f"one of the layer's {len(self.part_of_output)} outputs",
                where=self.where,
                remedy="The model class hands its weights over in an order unknown to this version; please report it.",
            )
        return self.part_of_output[index]

    def _add(self, index: int, part: Part, start: int, size: int) -> None:
        if part.linear is None:
            self.slots.append(DenseSlot(index, start, size, self._dense_rows))
            self._dense_rows += size
            return
        row_start, row_size, row_total = self.rows
        self._check_inputs(part.linear, row_total)
        taken = piece((row_start, row_size), (start, size))
        slot = Slot(index, part.linear, taken, self._trellis_words, self._suh_size, self._svh_size)
        self.slots.append(slot)
        self._trellis_words += slot.shard.trellis_words
        self._suh_size += taken.row_size
        self._svh_size += taken.column_size

    def _check_inputs(self, linear: StoredLinear, total: int) -> None:
        padded = pad_to_block(total)
        if linear.in_features != padded:
            raise Exl3PackError(
                found=f"a trellis with {linear.in_features} input channels",
                expected=f"{padded}: the layer's {total} inputs, padded to {BLOCK}",
                where=f"{self.where} ({linear.trellis.file}, {linear.trellis.name})",
                remedy=_WRONG_PACK,
            )


_NAMED_OUTPUTS = {"q": 0, "k": 1, "v": 2, "index_q": 3, "index_k": 4}
"""The shard ids that vLLM's attention projections use, by position."""


def layer_outputs(layer: torch.nn.Module, sizes: Sequence[int], total: int) -> list[Output]:
    """The outputs of a vLLM linear layer as this rank holds them.

    Args:
        layer: a ``LinearBase``; its ``tp_rank`` and ``tp_size`` count, not the process group's.
        sizes: output channels on this rank, by output (``output_partition_sizes``).
        total: output channels over all ranks (``output_size``).
    """
    rank, ranks = layer.tp_rank, layer.tp_size
    if sum(sizes) == total:  # one rank, or a layer that is not split along its outputs
        return [Output(size, 0, size) for size in sizes]
    whole = whole_outputs(layer)
    # Query heads are split; key and value heads are too, until there are fewer than ranks: then each is repeated.
    replicas = getattr(layer, "num_kv_head_replicas", 1)
    outputs = []
    for index, size in enumerate(sizes):
        copies = 1 if index == 0 else replicas
        split = Output(size * ranks // copies, rank // copies * size, size)
        outputs.append(Output(size, 0, size) if index in whole else split)
    return outputs


def _take_covered(where: str, part: Part, remaining: list[Output], *, last: bool) -> list[Output]:
    """Remove from ``remaining`` the outputs that one stored tensor spans, by its stored width."""
    width = _stored_width(part)
    covered: list[Output] = []
    while remaining:
        total = sum(output.total for output in covered)
        if covered and not last and _fits(part, width, total):
            break
        covered.append(remaining.pop(0))
    total = sum(output.total for output in covered)
    if not _fits(part, width, total):
        raise Exl3PackError(
            found=f"{width} output channels",
            expected=f"{total}, or that padded to {BLOCK}",
            where=f"{where} ({part.key})",
            remedy=_WRONG_PACK if all(output.size == output.total for output in covered) else _REPEATED,
        )
    return covered


_WRONG_PACK = "The pack does not belong to this config.json, or was converted by a faulty tool."
_REPEATED = (
    "Where the model class repeats part of this layer on every rank, this split is not served: use a smaller "
    "--tensor-parallel-size. Otherwise the pack does not belong to this config.json."
)


def _stored_width(part: Part) -> int:
    """Output channels as stored: slices of a linear lie side by side, or add up over the inputs."""
    if not part.linears:
        return part.dense.shape[0] if part.dense else 0
    widths = [linear.out_features for linear in part.linears]
    return widths[0] if part.slice_axis == "in" else sum(widths)


def _fits(part: Part, width: int, total: int) -> bool:
    return width == pad_to_block(total) if part.linears else width == total


def _ranges(outputs: Sequence[Output]) -> list[tuple[int, int]]:
    """Column ranges of one stored tensor that this rank takes, neighbours merged."""
    ranges: list[tuple[int, int]] = []
    base = 0
    for output in outputs:
        start = base + output.start
        if ranges and sum(ranges[-1]) == start:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + output.size)
        else:
            ranges.append((start, output.size))
        base += output.total
    return ranges
