"""The embedding op against the numpy codecs, for every kind of table."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_exl3.ops import embedding as module
from vllm_exl3.ops.rings import ring_states
from vllm_exl3.pack import Pack
from vllm_exl3.pack.codec import decode_embedding, unpack_rings
from vllm_exl3.pack.scaled_rows import dequantize_rows, quantize_rows

PACK = Path(__file__).parents[1] / "data" / "packs" / "qwen3-2.25-mul1-emb4"
WIDTHS = (128, 256, 576, 1000, 2880)


def lookup(
    ids: torch.Tensor, table: np.ndarray, scales: np.ndarray, width: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.ops.vllm_exl3.embedding(ids, torch.from_numpy(table), torch.from_numpy(scales), width, dtype)


def random_rings(rows: int, width: int, bits: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    groups = -(-width // 256)
    table = rng.integers(-(2**15), 2**15, (rows, groups, 1 + 16 * bits)).astype(np.int16)
    table[..., 0] = rng.uniform(0.01, 4, (rows, groups)).astype(np.float16).view(np.int16)
    return table.reshape(rows, -1), rng.choice([-1.0, 1.0], (groups, 256)).astype(np.float16)


def assert_half_close(ours: torch.Tensor, wanted: np.ndarray) -> None:
    """Equal to float16 values up to their last place, where float32 sums in another order may round apart.

    A sum of 256 terms that nearly cancel is off by the error of the terms, hence the row's largest value.
    """
    wanted = wanted.astype(np.float32)
    error = np.abs(ours.float().numpy() - wanted)
    assert (
        error <= np.spacing(np.abs(wanted).astype(np.float16)).astype(np.float32) + np.abs(wanted).max() * 1e-6
    ).all()
    assert (error > 0).mean() < 0.02


@pytest.mark.parametrize("bits", range(1, 9))
def test_states_are_the_specification_s(bits: int) -> None:
    table, _ = random_rings(40, 512, bits)
    words = table.reshape(40, 2, -1)
    states, _ = unpack_rings(words, bits, 256)
    assert np.array_equal(ring_states(torch.from_numpy(words[..., 1:]), bits, 256).numpy(), states)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("width", WIDTHS)
def test_row_codes_of_every_k_and_width(bits: int, width: int) -> None:
    table, signs = random_rings(30, width, bits)
    ids = torch.tensor([[29, 0, 7], [7, 7, 11]])
    ours = lookup(ids, table, signs, width)
    assert ours.shape == (2, 3, width)
    assert_half_close(ours, decode_embedding(table[ids.numpy().ravel()], signs, bits, width).reshape(2, 3, width))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([4, 8]), st.sampled_from([1, 127, 129, *WIDTHS]), st.integers(0, 99), st.booleans())
def test_integer_tables_are_exact(bits: int, width: int, seed: int, half: bool) -> None:
    rng = np.random.default_rng(seed)
    codes, scales = quantize_rows(rng.standard_normal((20, width)).astype(np.float32), bits)
    ids = torch.from_numpy(rng.integers(0, 20, 7))
    wanted = torch.from_numpy(dequantize_rows(codes, scales, width))[ids]
    dtype = torch.bfloat16 if half else torch.float32
    assert torch.equal(lookup(ids, codes, scales, width, dtype), wanted.to(dtype))


def test_the_pack_s_own_table() -> None:
    pack = Pack.open(PACK)
    stored = pack.embeddings["model.embed_tokens"]
    table, signs = pack.read(stored.trellis.name), pack.read(stored.signs.name)
    ours = lookup(torch.arange(stored.rows), np.array(table), np.array(signs), 256)
    assert_half_close(ours, decode_embedding(table, signs, stored.bits, 256))


def next_row(table: np.ndarray, scales: np.ndarray) -> None:
    table[5] = table[6]


def one_sign(table: np.ndarray, signs: np.ndarray) -> None:
    signs[1, 40] *= -1


def one_scale(table: np.ndarray, scales: np.ndarray) -> None:
    scale = table.reshape(30, 3, -1)[5, 1, :1].view(np.float16)
    scale *= np.float16(1.05)


def one_bit(table: np.ndarray, scales: np.ndarray) -> None:
    table[5, 60] ^= 1


@pytest.mark.parametrize("fault", [next_row, one_sign, one_scale, one_bit])
def test_the_comparison_sees_one_wrong_row_sign_scale_or_bit(fault: Callable[..., None]) -> None:
    table, signs = random_rings(30, 576, 3)
    wanted = decode_embedding(table[[5]], signs, 3, 576)
    fault(table, signs)
    with pytest.raises(AssertionError):
        assert_half_close(lookup(torch.tensor([5]), table, signs, 576), wanted)


@pytest.mark.parametrize("kind", ["rings", 4, 8])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kind: str | int) -> None:
    if kind == "rings":
        table, scales = random_rings(50, 1000, 5)
    else:
        table, scales = quantize_rows(
            np.random.default_rng(1).standard_normal((50, 1000)).astype(np.float32), int(kind)
        )
    ids = torch.randint(0, 50, (77,), generator=torch.Generator().manual_seed(1))
    batch = lookup(ids, table, scales, 1000)
    for position in (0, 13, 76):
        assert torch.equal(lookup(ids[position], table, scales, 1000), batch[position])


def test_more_rows_than_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table, signs = random_rings(50, 576, 2)
    ids = torch.arange(50)
    whole = lookup(ids, table, signs, 576)
    monkeypatch.setattr(module, "_DECODED_AT_ONCE", 576 * 7)
    assert torch.equal(lookup(ids, table, signs, 576), whole)
    assert lookup(ids[:0], table, signs, 576).shape == (0, 576)


@pytest.mark.parametrize("kind", ["rings", 4, 8])
def test_the_op_s_schema_and_fake_are_right(kind: str | int) -> None:
    if kind == "rings":
        table, scales = random_rings(9, 576, 4)
    else:
        table, scales = quantize_rows(np.ones((9, 576), np.float32), int(kind))
    arguments = (torch.tensor([[1, 2]]), torch.from_numpy(table), torch.from_numpy(scales), 576, torch.bfloat16)
    torch.library.opcheck(torch.ops.vllm_exl3.embedding.default, arguments)


@pytest.mark.parametrize("width", [0, 299, 301, 302, 600])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_width_that_is_not_the_table_s_reads_nothing(bits: int, width: int) -> None:
    table, scales = quantize_rows(np.ones((5, 300), np.float32), bits)
    if bits == 4 and width == 299:
        return  # its rows take as many bytes
    with pytest.raises(ValueError, match=f"width {width}: found a table"):
        lookup(torch.tensor([4]), table, scales, width)
    with pytest.raises(ValueError, match="expected rows and scales of that width"):
        lookup(torch.tensor([4]), table, scales[:4], 300)


@pytest.mark.parametrize("width", [0, 256, 513, 5000])
def test_a_width_that_is_not_the_row_code_s_reads_nothing(width: int) -> None:
    table, signs = random_rings(5, 300, 4)
    with pytest.raises(ValueError, match=f"width {width}: found a table"):
        lookup(torch.tensor([4]), table, signs, width)
