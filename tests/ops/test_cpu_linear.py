"""The CPU library's linear and decoding: every rate, codebook, instruction set, dtype and shape."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.cpu_cases import (
    EVERY_KIND,
    Layer,
    instruction_sets,
    needs_library,
    relative_error,
    whole,
)
from vllm_exl3.cpu import backend
from vllm_exl3.cpu.library import library
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import Codebook

pytestmark = needs_library

BOUND = 5e-4
"""Relative error that the design allows before the final cast."""


def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return backend.linear(x, *layer.tensors(), layer.bias, layer.layout)


def test_all_65536_states_decode_exactly() -> None:
    # At K = 8 a position's state is its symbol and the one before: alternating pairs reach every state.
    pairs = np.arange(65536, dtype=np.uint32)
    symbols = np.stack([pairs >> 8, pairs & 255], axis=1).astype(np.uint8)
    trellis = symbols.reshape(-1, 4)[:, ::-1].copy().view(np.int16).reshape(8, 64, 128)
    for codebook in Codebook:
        shard = whole(codebook, 16, 128, 1024)
        suh, svh = torch.ones(128).half(), torch.ones(1024).half()
        weight = backend.dequantize(
            torch.from_numpy(trellis).flatten(), suh, svh, Layer(shard).layout, True, torch.float16
        )
        states = np.unique(codec.codebook_table(codebook).view(np.uint16))
        np.testing.assert_array_equal(weight.numpy(), codec.decode(trellis, 16, codebook))
        np.testing.assert_array_equal(np.unique(weight.numpy().view(np.uint16)), states)


@pytest.mark.parametrize(("codebook", "half_bits"), EVERY_KIND)
def test_decode_is_exact(codebook: Codebook, half_bits: int) -> None:
    layer = Layer(whole(codebook, half_bits, 256, 384), seed=half_bits)
    weight = backend.dequantize(*layer.tensors(), layer.layout, True, torch.float32)
    np.testing.assert_array_equal(weight.numpy(), codec.decode(layer.trellises[0], half_bits, codebook))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dequantize_returns_the_used_weight(dtype: torch.dtype) -> None:
    layer = Layer(Shard(8, Codebook.MUL1, 256, 256, 0, 200), Shard(6, Codebook.MCG, 256, 128, 100, 28))
    weight = backend.dequantize(*layer.tensors(), layer.layout, False, dtype)
    expected = layer.expected(torch.eye(256))
    assert weight.shape == (256, 228)
    epsilon = torch.finfo(dtype).eps
    np.testing.assert_allclose(weight.double().numpy(), expected, rtol=epsilon, atol=2e-5)


@pytest.mark.parametrize(("codebook", "half_bits"), EVERY_KIND)
def test_linear_of_every_rate_codebook_and_instruction_set(isa: str, codebook: Codebook, half_bits: int) -> None:
    layer = Layer(whole(codebook, half_bits, 384, 256), seed=half_bits)
    x = torch.randn(13, 384, generator=torch.Generator().manual_seed(1))
    expected = layer.expected(x)
    for rows in (1, 2, 3, 4, 5, 13):
        assert relative_error(run(layer, x[:rows]), expected[:rows]) < BOUND, rows


def test_typical_error_is_half_the_bound() -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    for codebook in Codebook:
        layer = Layer(whole(codebook, 8, 1024, 512))
        assert relative_error(run(layer, x), layer.expected(x)) < 2.6e-4, codebook


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_rounded_once(isa: str, dtype: torch.dtype) -> None:
    layer = Layer(whole(Codebook.MUL1, 8, 256, 256), bias=torch.float16)
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    y, wide = run(layer, x), run(layer, x.float())
    assert y.dtype == dtype
    assert torch.equal(y, wide.to(dtype))


@pytest.mark.parametrize("bias", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9])
def test_shards_crops_and_bias(isa: str, bias: torch.dtype, rows: int) -> None:
    layer = Layer(
        Shard(8, Codebook.MUL1, 256, 256, 0, 250),
        Shard(5, Codebook.MUL1, 256, 128, 60, 1),
        Shard(12, Codebook.MCG, 384, 384, 100, 250),
        Shard(4, Codebook.INST3, 256, 128, 0, 0),
        Shard(16, Codebook.INST3, 256, 128, 128, 0),
        Shard(2, Codebook.INST3, 256, 128, 0, 128),
        bias=bias,
    )
    x = torch.randn(rows, 201, generator=torch.Generator().manual_seed(3))
    y = run(layer, x)
    assert y.shape == (rows, 250 + 1 + 250 + 128)
    assert relative_error(y, layer.expected(x)) < BOUND


@pytest.mark.parametrize("in_features", [1, 15, 127, 128, 129, 255, 256])
def test_inputs_are_zero_extended(isa: str, in_features: int) -> None:
    layer = Layer(whole(Codebook.MUL1, 6, 256, 128))
    x = torch.randn(3, in_features, generator=torch.Generator().manual_seed(4))
    assert relative_error(run(layer, x), layer.expected(x)) < BOUND
    for row in x.split(1):
        assert relative_error(run(layer, row), layer.expected(row)) < BOUND


def test_strided_rows() -> None:
    layer = Layer(whole(Codebook.MUL1, 8, 256, 128))
    wide = torch.randn(6, 700, generator=torch.Generator().manual_seed(5))
    for x in (wide[:, 100:356], wide[::2, :256], wide[:, ::2][:, :256], wide[:, :6].T[:, :6], wide[:0, :256]):
        assert torch.equal(run(layer, x), run(layer, x.contiguous()))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("codebook", list(Codebook))
def test_any_magnitude(codebook: Codebook, magnitude: float) -> None:
    layer = Layer(whole(codebook, 8, 256, 256))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(6)) * magnitude
    assert relative_error(run(layer, x), layer.expected(x)) < BOUND
    # Rows of very different size do not disturb each other.
    x[1] *= 1e-7
    x[2] = 0
    y, expected = run(layer, x), layer.expected(x)
    assert not y[2].any()
    for row in (0, 1, 3):
        assert relative_error(y[row], expected[row]) < BOUND


@pytest.mark.parametrize("codebook", list(Codebook))
def test_one_hot_rows_and_outliers(isa: str, codebook: Codebook) -> None:
    layer = Layer(whole(codebook, 8, 256, 128))
    x = torch.zeros(6, 256)
    x[torch.arange(4), torch.tensor([0, 1, 130, 255])] = torch.tensor([1.0, -3.0, 1e-3, 7e4])
    x[4] = 1
    x[5] = torch.randn(256, generator=torch.Generator().manual_seed(7))
    x[5, 3] = 1e4
    y, expected = run(layer, x), layer.expected(x)
    for row in range(6):
        assert relative_error(y[row], expected[row]) < BOUND, row
        assert torch.equal(run(layer, x[row : row + 1])[0], y[row])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("codebook", list(Codebook))
def test_sums_of_the_largest_weights_fit(isa: str, codebook: Codebook, sign: float) -> None:
    """A trellis may repeat one state: every block sum is then as large as its codebook allows."""
    table = codec.codebook_table(codebook).astype(np.float64)
    layer = Layer(whole(codebook, 16, 256, 128))
    layer.suhs[0][:] = 1
    x = torch.zeros(5, 256)
    x[:, ::128] = sign * torch.rand(5, 2, generator=torch.Generator().manual_seed(8)) + sign
    for state in (int(table.argmax()), int(table.argmin())):
        # At K = 8 the symbols a, b, a, b … make the states ab and ba in turn.
        layer.trellises[0][:] = np.uint16(state).view(np.int16)
        expected = layer.expected(x)
        for rows in (1, 5):
            # One state's rounding does not average out: its own bound is half a unit in the last place.
            assert relative_error(run(layer, x[:rows]), expected[:rows]) < 2 * BOUND


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize(("codebook", "half_bits"), EVERY_KIND)
def test_reads_stay_inside_the_trellis(isa: str, codebook: Codebook, half_bits: int) -> None:
    """The memory before and after may not exist: a read past either end kills this process."""
    layer = Layer(whole(codebook, half_bits, 128, 128))
    words, suh, svh = layer.tensors()
    x = torch.randn(5, 128)
    with guarded_pages(words.numel() * 2) as (first, last):
        for place in (first, last):
            place.copy_(words)
            for rows in (1, 5):
                y = backend.linear(x[:rows], place, suh, svh, None, layer.layout)
                assert torch.equal(y, run(layer, x[:rows]))


@contextmanager
def guarded_pages(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """int16 tensors of ``size`` bytes that begin right after, and end right before, memory that cannot be read."""
    page = mmap.PAGESIZE
    inner = -(-size // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, inner + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + page + inner):
        assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0
    view = torch.frombuffer(memory, dtype=torch.int16)
    try:
        yield view[page // 2 :][: size // 2], view[(page + inner - size) // 2 :][: size // 2]
    finally:
        for guard in (address, address + page + inner):
            libc.mprotect(ctypes.c_void_p(guard), page, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 17, 199])
def test_what_is_not_finite_poisons_its_row_only(isa: str, value: float, column: int) -> None:
    layer = Layer(whole(Codebook.MUL1, 8, 256, 128))
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(9))
    clean = run(layer, x)
    x[2, column] = value
    y = run(layer, x)
    assert y[2].isnan().all()
    assert run(layer, x[2:3]).isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(y[keep], clean[keep])


@pytest.mark.parametrize(("codebook", "half_bits"), [(Codebook.MUL1, 8), (Codebook.MUL1, 3), (Codebook.MCG, 14)])
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_threads(
    isa: str, codebook: Codebook, half_bits: int
) -> None:
    layer = Layer(whole(codebook, half_bits, 512, 640))
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(10))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole_batch = run(layer, x)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(run(layer, x), whole_batch)
            for rows in (1, 2, 3, 4, 6, 33, 257):
                assert torch.equal(run(layer, x[-rows:]), whole_batch[-rows:]), (threads, rows)
    finally:
        torch.set_num_threads(before)


def test_instruction_sets_agree() -> None:
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(11))
    for codebook in Codebook:
        layer = Layer(whole(codebook, 10, 512, 256))
        results = []
        for name in instruction_sets():
            library().exl3_select_isa(name.encode())
            results.append(run(layer, x))
        library().exl3_select_isa(b"auto")
        for other in results[1:]:
            # The integer sums are equal; only float roundings of the input transform may differ.
            assert relative_error(other, results[0].double().numpy()) < 1e-4


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(EVERY_KIND),
    rows=st.integers(1, 40),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_any_layer(kind: tuple[Codebook, int], rows: int, blocks: tuple[int, int], data: st.DataObject) -> None:
    in_features, out_features = 128 * blocks[0], 128 * blocks[1]
    start = data.draw(st.integers(0, out_features - 1))
    size = data.draw(st.integers(1, out_features - start))
    columns = data.draw(st.integers(1, in_features))
    layer = Layer(Shard(kind[1], kind[0], in_features, out_features, start, size), seed=rows)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    expected = layer.expected(x)
    # The error of few columns may by chance be some deviations of the typical one, which is 3.2e-4, and 3.6e-4 where
    # the input has one channel. Rows count as one: those of such an input are multiples of each other, and their errors
    # are too.
    inputs = np.linalg.norm(layer.suhs[0].astype(np.float64)[:columns] * x.double().numpy(), axis=1)
    outputs = layer.svhs[0].astype(np.float64)[start : start + size]
    deviation = 3.6e-4 * np.sqrt(np.square(np.outer(inputs, outputs)).sum())
    error = np.linalg.norm(run(layer, x).double().numpy() - expected)
    assert error < deviation * (1 + 5 / np.sqrt(size))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trellis": torch.zeros(7, dtype=torch.int16)}, "trellis"),
        ({"trellis": torch.zeros(256 * 128 // 4, dtype=torch.int32)}, "trellis"),
        ({"suh": torch.zeros(255).half()}, "suh"),
        ({"suh": torch.zeros(256)}, "suh"),
        ({"svh": torch.zeros(256).half()[::2]}, "svh"),
        ({"bias": torch.zeros(127)}, "bias"),
        ({"x": torch.zeros(1, 257)}, "x"),
        ({"x": torch.zeros(1, 256, dtype=torch.float64)}, "x"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    layer = Layer(whole(Codebook.MUL1, 8, 256, 128))
    trellis, suh, svh = layer.tensors()
    arguments = {"x": torch.zeros(1, 256), "trellis": trellis, "suh": suh, "svh": svh, "bias": None, **change}
    with pytest.raises(ValueError, match=f"^{message}: found"):
        backend.linear(**arguments, shards=layer.layout)


@pytest.mark.parametrize(
    "shard",
    [
        Shard(3, Codebook.MCG, 128, 128, 0, 128),
        Shard(9, Codebook.MUL1, 128, 128, 0, 128),
        Shard(18, Codebook.MUL1, 128, 128, 0, 128),
        Shard(8, Codebook.MUL1, 192, 128, 0, 128),
        Shard(8, Codebook.MUL1, 128, 128, 64, 128),
    ],
)
def test_shards_that_do_not_exist_are_refused(shard: Shard) -> None:
    layer = Layer(shard)
    with pytest.raises(RuntimeError, match="not those of an EXL3 linear"):
        backend.linear(torch.zeros(1, 128), *layer.tensors(), None, layer.layout)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 17, 128, 600])
@pytest.mark.parametrize(("codebook", "half_bits"), EVERY_KIND)
def test_large_layers(isa: str, codebook: Codebook, half_bits: int, rows: int) -> None:
    if isa == "scalar" and rows > 17:
        pytest.skip("too slow to be of use")
    layer = Layer(whole(codebook, half_bits, 1536, 1152))
    x = torch.randn(rows, 1500, generator=torch.Generator().manual_seed(12))
    assert relative_error(run(layer, x), layer.expected(x)) < BOUND
