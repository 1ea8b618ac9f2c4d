"""What the decode path of routed experts multiplies, compiled for the host and held against the format's weights."""

import ctypes
import shutil

import numpy as np
import pytest

from tests.cuda.host_kernels import HostKernels, build
from vllm_exl3.pack.codec import decode_states
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.pack.tile import unpack_states

KINDS = [(half_bits, codebook) for half_bits in range(2, 17, 2) for codebook in Codebook]
KINDS += [(half_bits, Codebook.MUL1) for half_bits in (3, 5, 7)]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return build("products", tmp_path_factory.mktemp("products"))


@pytest.mark.parametrize(("half_bits", "codebook"), KINDS)
def test_products_of_every_state_add_up_to_the_weight(library: HostKernels, half_bits: int, codebook: Codebook) -> None:
    """mul1: k_inv times a word's bytes plus a constant; the others: its two halves."""
    tiles = np.random.default_rng(half_bits).integers(0, 1 << 16, (50, 8 * half_bits), dtype=np.uint16)
    words = np.zeros((50, 256), np.uint32)
    for tile, found in zip(tiles, words, strict=True):
        assert library.product_words(
            half_bits, int(codebook), tile.ctypes.data_as(ctypes.c_void_p), found.ctypes.data_as(ctypes.c_void_p)
        )
    if codebook is Codebook.MUL1:
        sums = words.view(np.uint8).reshape(50, 256, 4).sum(axis=2, dtype=np.int64)
        weights = ((1024 + sums) * 1774 / 2**18 - 10.3828125).astype(np.float16)
    else:
        halves = words.view(np.float16).reshape(50, 256, 2)
        weights = halves[..., 0] + halves[..., 1]
    np.testing.assert_array_equal(weights, decode_states(unpack_states(tiles.view(np.int16), half_bits), codebook))
