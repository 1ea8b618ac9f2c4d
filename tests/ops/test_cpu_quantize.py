"""The encoder and the quantizer on it: quality, padding, determinism, every rate and instruction set."""

import numpy as np
import pytest

from tests.ops.cpu_cases import EVERY_KIND, instruction_sets, needs_library
from vllm_exl3.cpu.library import library
from vllm_exl3.cpu.quantize import EncodedLinear, encode, quantize_linear
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import Codebook

pytestmark = needs_library

FULL_SEARCH = {4: 0.0677, 6: 0.0184, 8: 0.0045}
"""Mean squared error on N(0, 1) that a Viterbi search in float32 over whole rings reaches with mul1."""


def gaussian(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def decoded(linear: EncodedLinear, half_bits: int, codebook: Codebook) -> np.ndarray:
    return codec.dense_weight(linear.trellis, half_bits, codebook, linear.suh, linear.svh)


@pytest.mark.parametrize(("half_bits", "best"), FULL_SEARCH.items())
def test_encoder_is_within_a_tenth_of_a_full_search(half_bits: int, best: float) -> None:
    weights = gaussian(256, 256)
    trellis = encode(weights, half_bits, Codebook.MUL1, threads=2)
    error = np.square(codec.decode(trellis, half_bits, Codebook.MUL1) - weights, dtype=np.float64).mean()
    assert error < 1.1 * best


@pytest.mark.parametrize(("codebook", "half_bits"), EVERY_KIND)
def test_every_rate_reaches_its_error(codebook: Codebook, half_bits: int) -> None:
    weight = gaussian(128, 128, seed=half_bits) * 0.02
    linear = quantize_linear(weight, half_bits, codebook)
    assert linear.trellis.shape == (8, 8, 8 * half_bits)
    error = np.square(decoded(linear, half_bits, codebook) - weight).sum() / np.square(weight, dtype=np.float64).sum()
    assert error == pytest.approx(linear.error, rel=1e-3)
    # Halving the step each bit, from what a trellis of one bit reaches.
    assert error < 0.3 * 4.0 ** (1 - half_bits / 2) * (1.35 if half_bits < 14 else 2)


@pytest.mark.parametrize(("rows", "columns"), [(576, 576), (64, 200), (100, 1)])
def test_padding_decodes_to_zero_and_costs_no_accuracy(rows: int, columns: int) -> None:
    inner = gaussian(rows, columns)
    weight = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), np.float32)
    weight[:rows, :columns] = inner
    linear = quantize_linear(weight, 8, Codebook.MUL1)
    result = decoded(linear, 8, Codebook.MUL1)
    assert not result[rows:].any()
    assert not result[:, columns:].any()
    assert not linear.svh[columns:].any()
    if columns > 1:
        assert linear.error < 0.0056


def test_dead_channels_inside_stay_zero() -> None:
    weight = gaussian(256, 256)
    weight[:, [3, 200]] = 0
    weight[[0, 129]] = 0
    result = decoded(quantize_linear(weight, 6, Codebook.MCG), 6, Codebook.MCG)
    assert not result[:, [3, 200]].any()
    assert not result[[0, 129]].any()


def test_all_zero_weight() -> None:
    linear = quantize_linear(np.zeros((128, 128), np.float32), 8, Codebook.MUL1)
    assert not decoded(linear, 8, Codebook.MUL1).any()
    assert linear.error == 0


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_scales_share_the_magnitude(magnitude: float) -> None:
    weight = gaussian(128, 256) * np.float32(magnitude)
    weight[:, 7] *= 30
    weight[5] *= 0.01
    linear = quantize_linear(weight, 8, Codebook.MUL1)
    assert linear.error < 0.006
    for scales in (linear.suh, linear.svh):
        assert np.isfinite(scales).all()
        # Normal float16 numbers, whose precision is full.
        assert np.median(np.abs(scales[scales != 0])) > 6.2e-5


def test_bits_depend_on_the_seed_and_on_nothing_else() -> None:
    weight = gaussian(128, 384)
    first = quantize_linear(weight, 8, Codebook.MUL1, seed=1, threads=1)
    for threads in (2, 5):
        again = quantize_linear(weight, 8, Codebook.MUL1, seed=1, threads=threads)
        for leaf in ("trellis", "suh", "svh"):
            np.testing.assert_array_equal(getattr(again, leaf), getattr(first, leaf))
    other = quantize_linear(weight, 8, Codebook.MUL1, seed=2)
    assert (other.trellis != first.trellis).any()


def test_markers() -> None:
    weight = gaussian(128, 128)
    markers = {codebook: quantize_linear(weight, 2, codebook).marker for codebook in Codebook}
    assert markers == {Codebook.INST3: None, Codebook.MCG: -877912083, Codebook.MUL1: -2082680531}


def test_progress_counts_tiles() -> None:
    calls: list[tuple[int, int]] = []
    encode(gaussian(384, 128), 16, Codebook.MUL1, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (192, 192)
    assert calls == sorted(calls)


def weights_of_many_kinds(seed: int) -> np.ndarray:
    """One block: Gaussian, small and large columns, ties (zeros, equal values) and values beyond the codebook."""
    weights = gaussian(128, 128, seed)
    weights[:, 32:48] *= 0.05
    weights[:, 48:64] *= 4
    weights[:, 64:80] = 0
    weights[:, 80:96] = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (128, 16))
    weights[:, 96:112] = 1e4
    return weights


def assert_all_find_the_same_trellis(half_bits: int, codebook: Codebook, seed: int) -> None:
    results = {}
    for name in instruction_sets():
        library().exl3_select_isa(name.encode())
        results[name] = encode(weights_of_many_kinds(seed), half_bits, codebook, threads=2)
    library().exl3_select_isa(b"auto")
    for name, result in results.items():
        np.testing.assert_array_equal(result, results["scalar"], err_msg=name)


@pytest.mark.parametrize("half_bits", sorted({half_bits for _, half_bits in EVERY_KIND}))
def test_instruction_sets_find_the_same_trellis(half_bits: int) -> None:
    """Each transposes costs in its own way, by how many bits the position brings; scalar code is the reference."""
    assert_all_find_the_same_trellis(half_bits, Codebook.MUL1, seed=half_bits)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("codebook", "half_bits"), EVERY_KIND)
def test_instruction_sets_find_the_same_trellis_of_every_kind(codebook: Codebook, half_bits: int, seed: int) -> None:
    assert_all_find_the_same_trellis(half_bits, codebook, seed)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.zeros((100, 128), np.float32), "multiples of 128"),
        (np.zeros((0, 128), np.float32), "multiples of 128"),
        (np.full((128, 128), np.nan, np.float32), "finite"),
    ],
)
def test_weights_that_cannot_be_quantized(weight: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_linear(weight, 8, Codebook.MUL1)


@pytest.mark.parametrize(("half_bits", "codebook"), [(9, Codebook.MUL1), (3, Codebook.MCG)])
def test_rates_that_do_not_exist(half_bits: int, codebook: Codebook) -> None:
    with pytest.raises(RuntimeError, match="not those of an EXL3 linear"):
        quantize_linear(gaussian(128, 128), half_bits, codebook)
    with pytest.raises(ValueError, match="half_bits"):
        quantize_linear(gaussian(128, 128), 18, codebook)
