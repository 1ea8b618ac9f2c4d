"""Splits on blocks of 128: what ranks hold adds up to the whole layer, at any edge."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_exl3.pack.codec import hadamard
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import BLOCK
from vllm_exl3.plan.partition import block_split, covering_blocks, piece


@given(start=st.integers(0, 10_000), size=st.integers(1, 10_000))
def test_covering_blocks_are_the_fewest_that_hold_the_range(start: int, size: int) -> None:
    first, width, offset = covering_blocks(start, size)
    assert first % BLOCK == 0 and width % BLOCK == 0
    assert first + offset == start and 0 <= offset < BLOCK
    assert start + size <= first + width < start + size + BLOCK


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [320, 384, 576, 640, 2304])
@settings(max_examples=1)
@given(seed=st.integers(0, 1 << 16))
def test_row_splits_at_any_edge_add_up_to_the_whole_product(width: int, ranks: int, seed: int) -> None:
    """x·H·W summed over ranks that each zero-extend their share equals the unsplit product."""
    rng = np.random.default_rng(seed)
    stored = -(-width // BLOCK) * BLOCK
    weight = rng.standard_normal((stored, 8))
    x = np.zeros(stored)
    x[:width] = rng.standard_normal(width)
    blocks = hadamard() / np.sqrt(BLOCK)
    total = np.zeros(8)
    edges = [width * rank // ranks for rank in range(ranks + 1)]
    for start, end in pairwise(edges):
        held = piece((start, end - start), (0, 8))
        local = np.zeros(held.row_size)
        local[held.row_offset : held.row_offset + end - start] = x[start:end]
        rotated = (local.reshape(-1, BLOCK) @ blocks).reshape(-1)
        total += rotated @ weight[held.row_start : held.row_start + held.row_size]
    whole = (x.reshape(-1, BLOCK) @ blocks).reshape(-1) @ weight
    np.testing.assert_allclose(total, whole, rtol=1e-10, atol=1e-10)


def test_piece_places_inputs_and_crops_outputs_in_their_blocks() -> None:
    held = piece((192, 192), (64, 192))
    assert (held.row_start, held.row_size, held.row_offset) == (128, 256, 64)
    assert (held.column_start, held.column_size, held.crop_start, held.crop_size) == (0, 256, 64, 192)


@given(blocks=st.integers(1, 200), ranks=st.integers(1, 32))
def test_whole_blocks_are_shared_without_gap_as_evenly_as_can_be(blocks: int, ranks: int) -> None:
    if blocks < ranks:
        with pytest.raises(Exl3PackError, match="--enable-expert-parallel"):
            block_split(blocks * BLOCK, 0, ranks, where="layer")
        return
    shares = [block_split(blocks * BLOCK, rank, ranks, where="layer") for rank in range(ranks)]
    assert [start for start, _ in shares] == [sum(size for _, size in shares[:rank]) for rank in range(ranks)]
    assert sum(size for _, size in shares) == blocks * BLOCK
    assert all(size % BLOCK == 0 for _, size in shares)
    assert max(size for _, size in shares) - min(size for _, size in shares) <= BLOCK


def test_a_published_split() -> None:
    assert [block_split(2304, rank, 4, where="") for rank in range(4)] == [
        (0, 640),
        (640, 640),
        (1280, 512),
        (1792, 512),
    ]


def test_one_block_and_one_rank_are_not_plural() -> None:
    with pytest.raises(Exl3PackError, match=r"found 1 block of 128 .* at most 1 rank: without"):
        block_split(BLOCK, 0, 2, where="layer")
