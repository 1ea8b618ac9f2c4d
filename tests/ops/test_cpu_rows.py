"""The C++ rows against the PyTorch reference, bit for bit: every instruction set, kind of table, K, width and dtype."""

import numpy as np
import pytest
import torch

from vllm_exl3.cpu import library, rows
from vllm_exl3.ops.embedding import embedding_reference
from vllm_exl3.ops.ngram import NgramTable, ngram_reference
from vllm_exl3.pack.scaled_rows import quantize_rows
from vllm_exl3.tools.random_ngram import random_rows

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = 37
IDS = torch.tensor([[36, 0, 7], [7, 7, 11], [35, 1, 2]])


def table_of(kind: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a random table: int8, int4, or a row code's K."""
    rng = np.random.default_rng(width)
    if kind.startswith("int"):
        codes, scales = quantize_rows(rng.standard_normal((ROWS, width)).astype(np.float32), int(kind[3:]))
        return torch.from_numpy(codes), torch.from_numpy(scales)
    groups = -(-width // 256)
    table = rng.integers(-(2**15), 2**15, (ROWS, groups, 1 + 16 * int(kind))).astype(np.int16)
    table[..., 0] = rng.uniform(0.01, 4, (ROWS, groups)).astype(np.float16).view(np.int16)
    signs = rng.choice([-1.0, 1.0], (groups, 256)).astype(np.float16)
    return torch.from_numpy(table.reshape(ROWS, -1)), torch.from_numpy(signs)


@pytest.mark.parametrize("kind", ["int8", "int4", *(str(bits) for bits in range(1, 9))])
@pytest.mark.parametrize("width", [1, 127, 128, 129, 256, 576, 1000, 2880])
def test_token_embeddings(isa: str, kind: str, width: int) -> None:
    table, scales = table_of(kind, width)
    for dtype in DTYPES:
        for scale_dtype in DTYPES if kind.startswith("int") else (torch.float16,):
            own = scales.to(scale_dtype)
            ours = rows.embedding(IDS, table, own, width, dtype)
            assert torch.equal(ours, embedding_reference(IDS, table, own, width, dtype))
    assert torch.equal(rows.embedding(IDS.int(), table, own, width, dtype), ours)
    assert rows.embedding(IDS[:0], table, own, width, dtype).shape == (0, 3, width)


@pytest.mark.parametrize("bits", range(1, 9))
def test_ngram_rows(isa: str, bits: int) -> None:
    rng = np.random.default_rng(bits)
    code = torch.from_numpy(random_rows(300, bits, rng))
    bias = torch.from_numpy(rng.uniform(-0.02, 0.02, (3, 160)).astype(np.float16))
    for first in (0, 90):
        table = NgramTable(bias, torch.tensor([0, 100, 220]), first)
        ids = torch.from_numpy(rng.integers(0, 300, (41, 3)))
        index = torch.from_numpy(rng.integers(0, 300, (41, 3)))
        for dtype in DTYPES:
            for places in (None, index):
                ours, theirs = torch.empty((41, 3, 160), dtype=dtype), torch.empty((41, 3, 160), dtype=dtype)
                rows.ngram(ids, places, code, table, ours)
                ngram_reference(ids, places, code, table, theirs)
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrong", [[ROWS], [-1], [0, 1 << 40]])
def test_an_id_outside_the_table_is_refused(wrong: list[int]) -> None:
    for kind in ("int8", "4"):
        table, scales = table_of(kind, 256)
        with pytest.raises(RuntimeError, match="outside the table"):
            rows.embedding(torch.tensor(wrong), table, scales, 256, torch.float32)


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    table, scales = table_of("int8", 256)
    with pytest.raises(ValueError, match="table: found strides"):
        rows.embedding(IDS, table.t(), scales, 256, torch.float32)


def test_a_call_the_library_would_misread_is_refused() -> None:
    for fields in ({"kind": 4}, {"kind": 2, "bits": 9}, {"kind": 2, "bits": 4, "width": 257}, {"kind": 3, "bits": 4}):
        call = library.RowCall(groups=1, **fields)
        with pytest.raises(RuntimeError, match="row codec"):
            library.check(library.library().exl3_gather_rows(call))
    with pytest.raises(RuntimeError, match="dtype"):
        library.check(library.library().exl3_gather_rows(library.RowCall(groups=1, width=1, scale_dtype=5)))
