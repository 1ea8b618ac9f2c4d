"""Which part of a stored trellis one tensor-parallel rank holds.

A trellis mixes 128 channels on either side through its Hadamard transforms, so a rank takes whole
blocks of 128: those that cover its range. On the output side the result is cropped. On the input
side the rank's activations are zero-extended to the blocks: the layer is linear, so where two ranks
share a block, each transforms its own part of it and the reduction adds them up. Only the shared
blocks are stored twice, and any width can be split at any edge.
"""

from dataclasses import dataclass

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import BLOCK, pad_to_block
from vllm_exl3.pack.wording import counted

__all__ = ["Piece", "block_split", "covering_blocks", "piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The blocks of one stored trellis that a rank holds, and its range within them.

    Attributes:
        row_start: first stored input channel, a multiple of 128.
        row_size: stored input channels, a multiple of 128.
        row_offset: where the rank's inputs begin, counted from ``row_start``; less than 128.
        column_start: first stored output channel, a multiple of 128.
        column_size: stored output channels, a multiple of 128.
        crop_start: first returned channel, counted from ``column_start``; less than 128.
        crop_size: returned channels.
    """

    row_start: int
    row_size: int
    row_offset: int
    column_start: int
    column_size: int
    crop_start: int
    crop_size: int


def covering_blocks(start: int, size: int) -> tuple[int, int, int]:
    """The blocks of 128 that cover channels ``[start, start + size)``.

    Returns:
        First stored channel, number of stored channels, and where the range begins in them.
    """
    first = start // BLOCK * BLOCK
    return first, pad_to_block(start + size) - first, start - first


def piece(rows: tuple[int, int], columns: tuple[int, int]) -> Piece:
    """The piece for input channels ``(start, size)`` and output channels ``(start, size)``."""
    return Piece(*covering_blocks(*rows), *covering_blocks(*columns), columns[1])


def block_split(total: int, rank: int, ranks: int, *, where: str) -> tuple[int, int]:
    """This rank's share of ``total`` stored channels in whole blocks of 128, as even as whole blocks allow.

    Experts are split so, with nothing stored twice: nobody outside them sees the seam, so the ranks'
    shares need not be equal. 2304 channels over four ranks are 640, 640, 512 and 512.

    Args:
        total: stored channels, a multiple of 128.
        rank: this rank.
        ranks: how many share the channels.
        where: the layer, for the error.

    Returns:
        First channel and number of channels.

    Raises:
        Exl3PackError: there are fewer blocks than ranks.
    """
    blocks = total // BLOCK
    if blocks < ranks:
        raise Exl3PackError(
            found=f"{counted(blocks, 'block')} of {BLOCK} channels for {counted(ranks, 'rank')}",
            expected="at least one block per rank",
            where=where,
            remedy="Use --enable-expert-parallel, which keeps experts whole, or at most "
            f"{counted(blocks, 'rank')}: without it, tensor-parallel and data-parallel ranks all share each expert.",
        )
    share, more = divmod(blocks, ranks)
    start = rank * share + min(rank, more)
    return start * BLOCK, (share + (rank < more)) * BLOCK
