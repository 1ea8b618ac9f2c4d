"""Splits on blocks of 128: property tests, and the refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import BLOCK
from vllm_exl3.plan.partition import column_range, legal_row_degrees, piece, row_range


@given(start=st.integers(0, 10_000), size=st.integers(1, 10_000))
def test_covering_blocks_are_the_fewest_that_hold_the_range(start: int, size: int) -> None:
    first, width, crop = column_range(start, size)
    assert first % BLOCK == 0 and width % BLOCK == 0
    assert first + crop == start and crop < BLOCK
    assert first <= start and start + size <= first + width < start + size + BLOCK


@given(blocks=st.integers(1, 64), ranks=st.integers(1, 8))
def test_whole_block_row_splits_tile_the_inputs(blocks: int, ranks: int) -> None:
    total = blocks * ranks * BLOCK
    size = total // ranks
    ranges = [row_range(rank * size, size, total, where="layer") for rank in range(ranks)]
    assert [start for start, _ in ranges] == [rank * size for rank in range(ranks)]
    assert sum(width for _, width in ranges) == total
    assert ranks > 64 or ranks in legal_row_degrees(total)


@pytest.mark.parametrize(
    ("total", "ranks", "legal"),
    [(576, 1, True), (320, 1, True), (576, 2, False), (2304, 4, False), (2304, 2, True), (4096, 8, True), (192, 3, False)],
)
def test_row_splits_inside_a_block_are_refused_by_name(total: int, ranks: int, legal: bool) -> None:
    size = total // ranks
    rank = ranks - 1
    if legal:
        start, width = row_range(rank * size, size, total, where="model.layers.0.mlp.down_proj")
        assert start == rank * size and width == -(-size // BLOCK) * BLOCK
        return
    with pytest.raises(Exl3PackError) as error:
        for each in range(ranks):
            row_range(each * size, size, total, where="model.layers.0.mlp.down_proj")
    assert "model.layers.0.mlp.down_proj" in str(error.value)
    assert "--tensor-parallel-size" in error.value.remedy
    assert str(size) in error.value.found


def test_piece_crops_the_wanted_columns_out_of_the_covering_blocks() -> None:
    taken = piece((128, 256), (64, 192))
    assert (taken.row_start, taken.row_size) == (128, 256)
    assert (taken.column_start, taken.column_size, taken.crop_start, taken.crop_size) == (0, 256, 64, 192)
