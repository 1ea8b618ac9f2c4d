"""Scratch of one window of the MoE op: how much the worst routing needs, and what lies where; without torch."""

from dataclasses import dataclass

from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.geometry import place_scratch, round_up
from vllm_exl3.cuda.moe_gemm import Gemm
from vllm_exl3.cuda.moe_geometry import Layer, MoeArgs, MoeForm

__all__ = ["CHUNK_ROWS", "Scratch", "Work", "most_work", "plan_scratch"]

CHUNK_ROWS = constants("moe/arguments.cuh")["CHUNK_ROWS"]
"""Rows that are transformed together where rows are grouped."""

_SUMS_BEYOND = 256
"""Rows beyond the last whose sums moe/epilogue.cuh reads, and does not use."""

_LISTS = (
    "sorted_slots",
    "slot_positions",
    "blocks",
    "chunks",
    "list_sizes",
    "totals",
    "row_largest",
    "scale_largest",
    "starts",
)
"""Parts that both stages share, named as the fields of `MoeArgs` that point to them."""


@dataclass(frozen=True, slots=True)
class Work:
    """The most that any routing makes of a window.

    Attributes:
        slots: (token, choice) pairs.
        padded: rows, those that pad an expert's among them.
        blocks: row blocks.
        chunks: pieces of `CHUNK_ROWS` rows, where rows are grouped.
        by_kind: whether the order of work is a list of its own, since kinds mix.
    """

    slots: int
    padded: int
    blocks: int
    chunks: int
    by_kind: bool


@dataclass(frozen=True, slots=True)
class Scratch:
    """The layout of scratch.

    Attributes:
        size: bytes in all.
        parts: where each part begins.
        info_rows: rows that ``descale`` and ``sums`` have for each projection.
    """

    size: int
    parts: dict[str, int]
    info_rows: int

    def place(self, arguments: MoeArgs, base: int) -> None:
        """Point the kernels' arguments to scratch at an address; fields that follow from the shapes are set before."""
        for name in _LISTS:
            setattr(arguments, name, base + self.parts[name])
        before = 0
        for index, stage in enumerate(arguments.stages):
            stage.rows, stage.out = (base + self.parts[f"{name}_{index}"] for name in ("rows", "out"))
            stage.schedule = base + self.parts[f"schedule_{index}"]
            stage.descale, stage.sums = (
                base + self.parts[name] + 4 * self.info_rows * before for name in ("descale", "sums")
            )
            before += stage.projections


def most_work(layer: Layer, tokens: int, form: MoeForm, gemm: Gemm) -> Work:
    """The most work that a window can be."""
    slots, padding = tokens * layer.top_k, gemm.values["row_padding"]
    padded = min(slots * padding, round_up(slots + layer.experts * (padding - 1), padding))
    return Work(
        slots=slots,
        padded=padded,
        blocks=min(slots, slots // min(form.tile_rows, gemm.values["thin_rows"]) + layer.experts),
        chunks=padded // CHUNK_ROWS + layer.experts if form.wide else 0,
        by_kind=form.wide and len(layer.codes) > 1,
    )


def plan_scratch(
    layer: Layer, tokens: int, form: MoeForm, work: Work, stages: tuple[dict[str, int], dict[str, int]], sorters: int
) -> Scratch:
    """Sizes and places.

    Args:
        layer: what the layer is like.
        tokens: of the window.
        form: how to multiply.
        work: what there is to do at most.
        stages: widths and projections of both stages, by the fields of `MoeStage`.
        sorters: thread blocks that sort slots.
    """
    item, rows = (2, work.padded) if form.wide else (4, work.slots)  # of outputs; in all
    row_infos = 4 * (rows * layer.projections + (_SUMS_BEYOND if form.wide else 0))
    first, second = stages
    inputs, outputs = (
        [stage["projections"] * count * stage[width] * size for stage in stages]
        for count, width, size in ((work.padded, "in_features", 2), (rows, "out_features", item))
    )
    sizes = {
        "rows_0": max(inputs[0], outputs[1]),
        "out_0": outputs[0],
        "rows_1": inputs[1],
        "descale": row_infos,
        "sums": row_infos,
        "sorted_slots": 4 * work.padded,
        "slot_positions": 4 * work.slots,
        "blocks": 16 * work.blocks,
        "chunks": 16 * work.chunks,
        "schedule_0": 16 * work.blocks * first["projections"] * work.by_kind,
        "schedule_1": 16 * work.blocks * second["projections"] * work.by_kind,
        "list_sizes": 8,
        "totals": 4 * sorters * layer.experts,
        "row_largest": 4 * tokens,
        "scale_largest": 4 * layer.experts * first["projections"],
        "starts": 4 * (layer.experts + 1),
    }
    parts, end = place_scratch(sizes)
    # The first stage's rows are dead when the second stage's outputs are written.
    return Scratch(end, {**parts, "out_1": parts["rows_0"]}, rows)
