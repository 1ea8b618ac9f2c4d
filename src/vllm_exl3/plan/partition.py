"""Which part of a stored trellis one tensor-parallel rank holds.

A trellis mixes 128 channels on either side through its Hadamard transforms, so a rank can only take
whole blocks of 128. Columns have a cure: take the blocks that cover the wanted range and crop the
result. Rows have none: a block of inputs that two ranks share cannot be transformed by either.
"""

from dataclasses import dataclass

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import BLOCK

__all__ = ["Piece", "column_range", "legal_row_degrees", "piece", "row_range"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The blocks of one stored trellis that a rank holds, and the columns it returns.

    Attributes:
        row_start: first stored input channel, a multiple of 128.
        row_size: stored input channels, a multiple of 128.
        column_start: first stored output channel, a multiple of 128.
        column_size: stored output channels, a multiple of 128.
        crop_start: first returned channel, counted from ``column_start``.
        crop_size: returned channels.
    """

    row_start: int
    row_size: int
    column_start: int
    column_size: int
    crop_start: int
    crop_size: int


def column_range(start: int, size: int) -> tuple[int, int, int]:
    """The blocks that cover columns ``[start, start + size)``.

    Returns:
        First stored column, number of stored columns, and where the wanted range begins in them.
    """
    first = start // BLOCK * BLOCK
    last = -(-(start + size) // BLOCK) * BLOCK
    return first, last - first, start - first


def row_range(start: int, size: int, total: int, *, where: str) -> tuple[int, int]:
    """The blocks of rows ``[start, start + size)`` of ``total`` logical inputs.

    Args:
        start: first input channel of this rank.
        size: input channels of this rank.
        total: input channels of the layer, before padding to 128.
        where: the layer, for the error.

    Returns:
        First stored row and number of stored rows; the last rank's share is padded to 128.

    Raises:
        Exl3PackError: an edge of the range lies inside a block of 128.
    """
    end = start + size
    if start % BLOCK or (end % BLOCK and end != total):
        degrees = ", ".join(str(degree) for degree in legal_row_degrees(total))
        raise Exl3PackError(
            found=f"a tensor-parallel rank that takes inputs {start} to {end} of {total}",
            expected=f"edges that are multiples of {BLOCK}, the channels that one Hadamard transform mixes",
            where=where,
            remedy=f"Use --tensor-parallel-size with one of {degrees} for this layer, or pipeline parallelism.",
        )
    return start, -(-size // BLOCK) * BLOCK


def legal_row_degrees(total: int, limit: int = 64) -> list[int]:
    """Tensor-parallel degrees that split ``total`` inputs at multiples of 128, up to ``limit`` ranks."""
    return [degree for degree in range(1, limit + 1) if degree == 1 or total % (degree * BLOCK) == 0]


def piece(rows: tuple[int, int], columns: tuple[int, int]) -> Piece:
    """The piece for stored rows ``(start, size)`` and wanted columns ``(start, size)``."""
    column_start, column_size, crop_start = column_range(*columns)
    return Piece(*rows, column_start, column_size, crop_start, columns[1])
