"""The reference decoder against exllamav3's own vectors, and against its own inverse."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_exl3.pack import Codebook, Pack, StoredLinear
from vllm_exl3.pack.codec import (
    codebook_table,
    decode,
    decode_embedding,
    decode_ngram,
    decode_states,
    dense_weight,
    hadamard,
    transform_blocks,
    unpack_rings,
    unpack_signs,
)
from vllm_exl3.pack.stored import HALF_BITS
from vllm_exl3.pack.tile import new_bits, pack_states, position_of, row_and_column, tile_words, unpack_states

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "exl3-golden.json").read_text())
PROBED = sorted(path.parent for path in DATA.glob("packs/*/golden_linear.npz"))


def _golden(half_bits: int) -> dict:
    return GOLDEN[f"K={half_bits / 2:g}"]


def _golden_tile(half_bits: int) -> np.ndarray:
    return ((np.arange(tile_words(half_bits)) * 40503 + 12345) % 65536).astype(np.uint16)


def _sha256(values: np.ndarray, dtype: str) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).astype(dtype, copy=False).tobytes()).hexdigest()


def _codebooks(half_bits: int) -> list[Codebook]:
    return [Codebook.MUL1] if half_bits % 2 else list(Codebook)


EVERY_CODE = [(half_bits, codebook) for half_bits in HALF_BITS for codebook in _codebooks(half_bits)]


@pytest.mark.parametrize("codebook", list(Codebook))
def test_codebook_table_has_the_published_hash(codebook: Codebook) -> None:
    table = codebook_table(codebook)
    assert table.shape == (65536,)
    assert _sha256(table, "<f2") == GOLDEN[f"codebook_sha256_{codebook.label}"]


@pytest.mark.parametrize("codebook", list(Codebook))
def test_single_states(codebook: Codebook) -> None:
    expected = {
        Codebook.INST3: (0x3A25, 0xBB5B, 0x3B74, 0xC066, 0xB7F8, 0xB98E, 0xB110),
        Codebook.MCG: (0x3F60, 0x304E, 0xBA13, 0x3E0F, 0xB915, 0x35E7, 0x3ACD),
        Codebook.MUL1: (0xC2E8, 0x3921, 0xB72D, 0xB89E, 0xBAF2, 0xBD42, 0xB936),
    }[codebook]
    states = np.array([0, 1, 2, 0x1234, 0x8000, 0xABCD, 0xFFFF])
    assert decode_states(states, codebook).view(np.uint16).tolist() == list(expected)


@pytest.mark.parametrize("half_bits", HALF_BITS)
def test_states_of_the_golden_tile(half_bits: int) -> None:
    golden = _golden(half_bits)
    states = unpack_states(_golden_tile(half_bits), half_bits)
    assert [hex(state) for state in states[:4]] == golden["states_0_to_3"]
    assert [hex(state) for state in states[-4:]] == golden["states_252_to_255"]
    assert golden["states_sha256"] in (_sha256(states, "<u2"), _sha256(states, "<u4"))


@pytest.mark.parametrize(("half_bits", "codebook"), EVERY_CODE)
def test_weights_of_the_golden_tile(half_bits: int, codebook: Codebook) -> None:
    weights = decode(_golden_tile(half_bits).reshape(1, 1, -1), half_bits, codebook)
    assert weights.shape == (16, 16) and weights.dtype == np.float16
    assert _sha256(weights, "<f2") == _golden(half_bits)[f"W_sha256_{codebook.label}"]


@pytest.mark.parametrize("half_bits", HALF_BITS)
def test_packing_inverts_unpacking(half_bits: int) -> None:
    trellis = np.random.default_rng(half_bits).integers(0, 65536, (3, 5, tile_words(half_bits)), dtype=np.uint16)
    states = unpack_states(trellis, half_bits)
    assert np.array_equal(pack_states(states, half_bits), trellis)
    assert np.array_equal(pack_states(states.astype(np.int64), half_bits), trellis)


@pytest.mark.parametrize("half_bits", HALF_BITS)
def test_neighbouring_states_overlap_around_the_ring(half_bits: int) -> None:
    trellis = np.random.default_rng(1).integers(0, 65536, (7, tile_words(half_bits)), dtype=np.uint16)
    states = unpack_states(trellis, half_bits).astype(np.int64)
    previous = np.roll(states, 1, axis=-1)
    new = new_bits(half_bits)
    assert np.array_equal(states >> new, previous & ((1 << (16 - new)) - 1))


def test_tile_order_is_a_permutation_with_the_published_start() -> None:
    row, column = row_and_column()
    assert sorted((row * 16 + column).tolist()) == list(range(256))
    assert list(zip(row[:16].tolist(), column[:16].tolist(), strict=True)) == [
        (0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8),
        (2, 0), (3, 0), (10, 0), (11, 0), (2, 8), (3, 8), (10, 8), (11, 8),
    ]  # fmt: skip
    assert np.array_equal(position_of()[row, column], np.arange(256))


@pytest.mark.parametrize(("half_bits", "codebook"), [(6, Codebook.MUL1), (5, Codebook.MUL1), (8, Codebook.INST3)])
def test_tiles_are_decoded_independently_and_in_place(half_bits: int, codebook: Codebook) -> None:
    trellis = np.random.default_rng(2).integers(-(2**15), 2**15, (3, 2, tile_words(half_bits)), dtype=np.int16)
    weights = decode(trellis, half_bits, codebook)
    for row in range(3):
        for column in range(2):
            tile = decode(trellis[row : row + 1, column : column + 1], half_bits, codebook)
            place = weights[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            assert np.array_equal(place, tile)


def test_decoding_in_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trellis = np.random.default_rng(3).integers(0, 65536, (9, 4, 48), dtype=np.uint16)
    whole = decode(trellis, 6, Codebook.MCG)
    monkeypatch.setattr("vllm_exl3.pack.codec._STEP_BYTES", 1)
    assert np.array_equal(decode(trellis, 6, Codebook.MCG), whole)


@pytest.mark.parametrize("shape", [(1, 1, 47), (1, 1, 32), (1, 1, 64)])
def test_wrong_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="48 16-bit words"):
        decode(np.zeros(shape, np.int16), 6, Codebook.MUL1)


@pytest.mark.parametrize("half_bits", [0, 1, 9, 11, 17, 18])
def test_unknown_rate_is_refused(half_bits: int) -> None:
    with pytest.raises(ValueError, match="half_bits"):
        tile_words(half_bits)


def test_hadamard_is_symmetric_and_its_own_inverse() -> None:
    matrix = hadamard()
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix @ matrix, np.eye(128))
    assert matrix[1, 1] < 0 < matrix[0, 0] and matrix[3, 3] > 0  # (−1)^popcount(i & j)
    values = np.random.default_rng(4).standard_normal((3, 384))
    assert np.allclose(transform_blocks(transform_blocks(values)), values)
    assert np.allclose(transform_blocks(values)[:, 128:256], values[:, 128:256] @ matrix)


def test_signs_are_unpacked_from_the_lowest_bit() -> None:
    signs = unpack_signs(np.array([0b101, -32768], np.int16))
    assert signs[:4].tolist() == [-1, 1, -1, 1]
    assert signs[16:].tolist() == [1] * 15 + [-1]


def test_dense_weight_of_packed_signs_equals_that_of_plain_ones() -> None:
    rng = np.random.default_rng(5)
    trellis = rng.integers(0, 65536, (8, 16, 32), dtype=np.uint16)
    su, sv = rng.integers(-(2**15), 2**15, 8, dtype=np.int16), rng.integers(-(2**15), 2**15, 16, dtype=np.int16)
    packed = dense_weight(trellis, 4, Codebook.INST3, su, sv)
    assert np.array_equal(packed, dense_weight(trellis, 4, Codebook.INST3, unpack_signs(su), unpack_signs(sv)))


def test_dense_weight_follows_the_defining_formula() -> None:
    rng = np.random.default_rng(6)
    trellis = rng.integers(0, 65536, (8, 8, 48), dtype=np.uint16)
    suh, svh = rng.standard_normal(128).astype(np.float16), rng.standard_normal(128).astype(np.float16)
    x = rng.standard_normal((3, 128))
    inner = decode(trellis, 6, Codebook.MUL1).astype(np.float64)
    expected = ((x * suh.astype(np.float64)) @ hadamard() @ inner @ hadamard()) * svh.astype(np.float64)
    assert np.allclose(x @ dense_weight(trellis, 6, Codebook.MUL1, suh, svh), expected)


def _weight_of(pack: Pack, linear: StoredLinear) -> np.ndarray:
    trellis, suh, svh = (pack.read(tensor.name) for tensor in (linear.trellis, linear.suh, linear.svh))
    return dense_weight(trellis, linear.half_bits, linear.codebook, suh, svh)


@pytest.mark.parametrize("folder", PROBED, ids=lambda folder: folder.name)
def test_linear_of_a_golden_pack(folder: Path) -> None:
    golden = np.load(folder / "golden_linear.npz")
    pack = Pack.open(folder)
    weight = _weight_of(pack, pack.linears[str(golden["key"])])
    dense = golden["w"].astype(np.float64)
    assert np.linalg.norm(weight[: dense.shape[0], : dense.shape[1]] - dense) <= 1e-3 * np.linalg.norm(dense)
    x, y = golden["x"].astype(np.float64), golden["y5"].astype(np.float64)
    assert np.linalg.norm(x @ weight[: x.shape[1], : y.shape[1]] - y) <= 1e-3 * np.linalg.norm(y)


def _swap_tiles(trellis: np.ndarray, suh: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return trellis[:, ::-1], suh


def _flip_sign(trellis: np.ndarray, suh: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return trellis, np.where(np.arange(len(suh)) == 7, -suh, suh)


@pytest.mark.parametrize("spoil", [_swap_tiles, _flip_sign])
def test_a_small_mistake_exceeds_the_bound(spoil) -> None:
    folder = Path(__file__).parents[1] / "data/packs/llama_tied-3.0-mul1"
    golden = np.load(folder / "golden_linear.npz")
    pack = Pack.open(folder)
    linear = pack.linears[str(golden["key"])]
    trellis, suh, svh = (pack.read(tensor.name) for tensor in (linear.trellis, linear.suh, linear.svh))
    weight = dense_weight(spoil(trellis, suh)[0], 6, linear.codebook, spoil(trellis, suh)[1], svh)
    dense = golden["w"].astype(np.float64)
    assert np.linalg.norm(weight - dense) > 1e-2 * np.linalg.norm(dense)


def _pack_ring(symbols: list[int], bits: int, scale: float) -> np.ndarray:
    """A ring written bit by bit, as the format describes it."""
    stream = [symbol >> place & 1 for symbol in symbols for place in range(bits)]
    words = [sum(bit << place for place, bit in enumerate(stream[i : i + 16])) for i in range(0, len(stream), 16)]
    return np.array([int(np.float16(scale).view(np.uint16)), *words], np.uint16)


@given(bits=st.integers(1, 8), seed=st.integers(0, 2**32 - 1))
def test_rings_decode_as_the_format_describes(bits: int, seed: int) -> None:
    symbols = np.random.default_rng(seed).integers(0, 1 << bits, 160).tolist()
    states, scale = unpack_rings(_pack_ring(symbols, bits, 0.75)[None], bits, 160)
    assert scale.tolist() == [0.75]
    for position in (0, 1, 15, 16, 80, 159):
        state = 0
        for back in range(160):
            state |= symbols[position - back] << (back * bits)
        assert int(states[0, position]) == state & 0xFFFF


def test_embedding_rows() -> None:
    rng = np.random.default_rng(8)
    rings = [[rng.integers(0, 16, 256).tolist() for _ in range(2)] for _ in range(3)]
    rows = np.stack([np.concatenate([_pack_ring(ring, 4, 0.5) for ring in row]) for row in rings]).view(np.int16)
    signs = rng.choice([-1.0, 1.0], (2, 256)).astype(np.float16)
    decoded = decode_embedding(rows, signs, 4, 300)
    assert decoded.shape == (3, 300) and decoded.dtype == np.float16
    states, _ = unpack_rings(_pack_ring(rings[1][1], 4, 0.5), 4, 256)
    second_group = signs[1] * (hadamard(256) @ (decode_states(states, Codebook.MUL1).astype(np.float64) * 0.5))
    assert np.allclose(decoded[1, 256:], second_group[:44], rtol=1e-3, atol=1e-3)


def test_ngram_rows() -> None:
    rng = np.random.default_rng(9)
    symbols = [rng.integers(0, 32, 160).tolist() for _ in range(4)]
    rows = np.stack([_pack_ring(ring, 5, 0.25) for ring in symbols]).view(np.int16)
    bias = rng.standard_normal((4, 160)).astype(np.float16)
    states, _ = unpack_rings(rows, 5, 160)
    exact = decode_states(states, Codebook.MUL1).astype(np.float64) * 0.25 + bias.astype(np.float64)
    decoded = decode_ngram(rows, 5, bias)
    assert decoded.shape == (4, 160) and np.allclose(decoded, exact, rtol=1e-3, atol=1e-3)
