"""The GEMM's mapping, emulated: lanes, ring positions, the permuted k, fragment order, and the two identities.

Written from the comments in the kernels, with the fragment layouts of the PTX manual, so that an error in the scheme
shows without a GPU. That the kernels follow the scheme is for the tests on a GPU.
"""

import numpy as np
import numpy.typing as npt
import pytest

from vllm_exl3.pack.codec import decode, decode_states
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.pack.tile import unpack_states

K_TILES, TOKENS = 4, 3


def _unit(half_bits: int, codebook: Codebook) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64]]:
    """States [k-tile, position] and decoded weights [64, 16] of one unit column."""
    tiles = np.random.default_rng(half_bits).integers(0, 1 << 16, (K_TILES, 1, 8 * half_bits), dtype=np.uint16)
    states = unpack_states(tiles[:, 0].view(np.int16), half_bits).astype(np.uint32)
    return states, decode(tiles.view(np.int16), half_bits, codebook).astype(np.float64)


def _step_positions(step: tuple[int, int], lane: int) -> list[int]:
    """Ring positions that registers a0..a3 hold in product (i, h)."""
    i, h = step
    first = 32 * (lane >> 2)
    return [first + 8 * i + offset for offset in (2 * h, 4 + 2 * h, 2 * h + 1, 5 + 2 * h)]


@pytest.mark.parametrize("half_bits", [2, 3, 5, 6, 8, 12, 16])
def test_integer_identity(half_bits: int) -> None:
    states, _ = _unit(half_bits, Codebook.MUL1)
    rng = np.random.default_rng(1)
    activations = rng.integers(-16256, 16257, (TOKENS, 64))
    high = (activations + 64) >> 7
    planes = np.stack([high, activations - 128 * high], axis=1).reshape(2 * TOKENS, 64)
    assert np.abs(planes).max() <= 127
    sums = np.zeros((16, 2 * TOKENS), dtype=np.int64)
    for step in [(i, h) for i in range(4) for h in range(2)]:
        a = np.zeros((16, 32), dtype=np.int64)  # A of m16n8k32: row g or g+8, k-slots 4q.. and 16+4q..
        b = np.zeros((32, 2 * TOKENS), dtype=np.int64)
        for lane in range(32):
            g, q = lane >> 2, lane & 3
            for register, position in enumerate(_step_positions(step, lane)):
                product = (int(states[q, position]) * 0x83DCD12D) & 0xFFFFFFFF
                slot = 4 * q + 16 * (register >> 1)
                a[g + 8 * (register & 1), slot : slot + 4] = [(product >> (8 * byte)) & 255 for byte in range(4)]
        for slot in range(32):
            q, second = (slot % 16) // 4, slot // 16
            b[slot] = planes[:, 16 * q + 2 * step[0] + 8 * step[1] + second]
        sums += a @ b
    states_dense = np.zeros((64, 16), dtype=np.int64)
    for tile in range(4):
        for position in range(256):
            lane, j = position >> 3, position & 7
            row, column = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1), (lane >> 2) + 8 * (j >> 2)
            product = (int(states[tile, position]) * 0x83DCD12D) & 0xFFFFFFFF
            states_dense[16 * tile + row, column] = sum((product >> (8 * byte)) & 255 for byte in range(4))
    np.testing.assert_array_equal(128 * sums[:, 0::2] + sums[:, 1::2], (activations @ states_dense).T)


@pytest.mark.parametrize("codebook", list(Codebook))
def test_half_products(codebook: Codebook) -> None:
    states, dense = _unit(8, codebook)
    x = np.random.default_rng(2).standard_normal((TOKENS, 64))
    sums = np.zeros((16, TOKENS))
    for i in range(4):
        a, b = np.zeros((16, 16)), np.zeros((16, TOKENS))
        for lane in range(32):
            g, q = lane >> 2, lane & 3
            values = decode_states(states[q, 32 * g + 8 * i : 32 * g + 8 * i + 8], codebook).astype(np.float64)
            for register, first in enumerate((0, 4, 2, 6)):
                slot = 2 * q + 8 * (register >> 1)
                a[g + 8 * (register & 1), slot : slot + 2] = values[first : first + 2]
        for slot in range(16):
            q, second = (slot % 8) // 2, slot // 8
            b[slot] = x[:, 16 * q + 2 * i + slot % 2 + 8 * second]
        sums += a @ b
    np.testing.assert_allclose(sums, (x @ dense).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("codebook", [Codebook.INST3, Codebook.MCG])
def test_pair_identity(codebook: Codebook) -> None:
    states = np.arange(1 << 16, dtype=np.uint64)
    product = states * 0xCBAC1FED if codebook == Codebook.MCG else states * 89226354 + 64248484
    folded = (product & 0x8FFF8FFF) ^ 0x3B603B60
    halves = [(folded >> shift & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64) for shift in (0, 16)]
    expected = decode_states(states.astype(np.uint32), codebook).astype(np.float64)
    assert np.abs(halves[0] + halves[1] - expected).max() <= 2.0**-10
