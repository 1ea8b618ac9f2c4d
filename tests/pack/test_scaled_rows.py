"""Integer embedding tables: the quantizer against its bounds, and headers against the layout."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_pack import Draft, llama
from vllm_exl3.pack import Exl3PackError, Pack, StoredScaledTable
from vllm_exl3.pack.bfloat16 import from_bfloat16, to_bfloat16
from vllm_exl3.pack.check import check, find_faults
from vllm_exl3.pack.scaled_rows import dequantize_rows, quantize_rows, row_layout
from vllm_exl3.pack.skip import classify

WIDTHS = st.sampled_from([1, 2, 63, 64, 127, 128, 129, 130, 256, 576, 2880])


def some_values(rows: int, width: int, seed: int, magnitude: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, width)) * magnitude * 10.0 ** rng.uniform(-2, 2, (rows, 1))).astype(np.float32)


@given(WIDTHS, st.integers(0, 99), st.sampled_from([1e-30, 1e-6, 1.0, 1e6]))
def test_int8_is_within_half_a_step(width: int, seed: int, magnitude: float) -> None:
    values = some_values(3, width, seed, magnitude)
    codes, scales = quantize_rows(values, 8)
    assert codes.dtype == np.int8 and codes.shape == (3, width) and scales.shape == (3, 1)
    step = np.abs(values).max(1, keepdims=True) / 127
    assert (np.abs(dequantize_rows(codes, scales, width) - values) <= step * 0.5001).all()


@given(WIDTHS, st.integers(0, 99), st.sampled_from([1e-30, 1e-6, 1.0, 1e6]))
def test_int4_is_never_worse_than_the_symmetric_grid(width: int, seed: int, magnitude: float) -> None:
    values = some_values(3, width, seed, magnitude)
    codes, scales = quantize_rows(values, 4)
    assert codes.dtype == np.uint8 and (codes.shape[1], scales.shape[1]) == row_layout(width, 4)
    assert np.array_equal(from_bfloat16(to_bfloat16(scales)), scales)
    error = (dequantize_rows(codes, scales, width) - values).astype(np.float64)
    for group in range(scales.shape[1]):
        columns = slice(group * 128, (group + 1) * 128)
        part = values[:, columns].astype(np.float64)
        step = from_bfloat16(to_bfloat16(np.abs(part).max(1, keepdims=True) / 7)).astype(np.float64)
        plain = np.clip(np.rint(part / step), -8, 7) * step - part
        assert (np.linalg.norm(error[:, columns], axis=1) <= np.linalg.norm(plain, axis=1) * 1.001 + 1e-38).all()


def test_int4_bytes_are_as_documented() -> None:
    """The even column in the low half, each half plus 8, value = (half - 8) * scale."""
    codes = np.array([[0x0F, 0x81, 0x78]], np.uint8)
    values = dequantize_rows(codes, np.array([[0.5]], np.float32), 5)
    assert values.tolist() == [[3.5, -4.0, -3.5, 0.0, 0.0]]
    assert dequantize_rows(np.array([[-127, 3]], np.int8), np.array([[2.0]]), 2).tolist() == [[-254.0, 6.0]]


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros_and_tiny_groups_do_not_overflow(bits: int) -> None:
    values = np.zeros((2, 256), np.float32)
    values[1, 3] = 1e-44
    codes, scales = quantize_rows(values, bits)
    assert np.isfinite(scales).all() and not dequantize_rows(codes, scales, 256).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_refused_with_its_row(value: float) -> None:
    values = np.ones((5, 128), np.float32)
    values[3, 7] = value
    with pytest.raises(ValueError, match="row 3"):
        quantize_rows(values, 4)


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=50))
def test_bfloat16_is_the_nearest(values: list[float]) -> None:
    singles = np.array(values, np.float32)
    rounded = from_bfloat16(to_bfloat16(singles))
    assert (np.abs(rounded - singles) <= np.abs(singles) * 2.0**-8 + 1e-40).all()
    assert np.array_equal(to_bfloat16(rounded), to_bfloat16(singles))


def with_table(bits: int) -> Draft:
    """A small Llama whose embedding is an integer table."""
    draft = llama()
    draft.sidecar = None
    del draft.tensors["model.embed_tokens.weight"]
    codes, scales = quantize_rows(some_values(256, 128, 1, 1.0), bits)
    draft.tensors["model.embed_tokens.qrows"] = ("U8" if bits == 4 else "I8", codes)
    draft.tensors["model.embed_tokens.scales"] = ("F32", scales)
    return draft


@pytest.mark.parametrize("bits", [4, 8])
def test_headers_say_how_a_table_is_coded(bits: int, tmp_path: Path) -> None:
    pack = Pack.open(with_table(bits).write(tmp_path))
    table = pack.embeddings["model.embed_tokens"]
    assert isinstance(table, StoredScaledTable)
    assert (table.bits, table.rows, table.groups) == (bits, 256, 1)
    assert check(pack) == []
    accounts = classify(pack)
    assert accounts.served[f"int{bits} embeddings"] == table.nbytes and not accounts.unknown


def shorten_scales(draft: Draft) -> None:
    draft.tensors["model.embed_tokens.scales"] = ("F32", np.ones((255, 1)))


def drop_scales(draft: Draft) -> None:
    draft.drop("embed_tokens.scales")


def scales_per_column(draft: Draft) -> None:
    draft.tensors["model.embed_tokens.scales"] = ("F32", np.ones((256, 2)))


def other_integers(draft: Draft) -> None:
    draft.tensors["model.embed_tokens.qrows"] = ("I16", np.ones((256, 128)))


@pytest.mark.parametrize("spoil", [shorten_scales, drop_scales, scales_per_column, other_integers])
def test_tables_that_contradict_themselves_are_refused(spoil: Callable[[Draft], None], tmp_path: Path) -> None:
    draft = with_table(4)
    spoil(draft)
    with pytest.raises(Exl3PackError, match=r"embed_tokens\.(qrows|scales)"):
        Pack.open(draft.write(tmp_path))


def test_an_integer_table_alone_makes_no_exl3_pack(tmp_path: Path) -> None:
    draft = with_table(8)
    draft.tensors = {name: spec for name, spec in draft.tensors.items() if "embed_tokens" in name}
    with pytest.raises(Exl3PackError, match="trellis"):
        Pack.open(draft.write(tmp_path))


def test_a_dense_copy_beside_a_table_is_skipped(tmp_path: Path) -> None:
    draft = with_table(8)
    draft.tensors["model.embed_tokens.weight"] = ("F16", np.ones((256, 128)))
    pack = Pack.open(draft.write(tmp_path))
    assert not list(find_faults(pack))
    assert "dense copy of an EXL3 module" in classify(pack).skipped
