"""Which kernel serves embeddings and n-gram rows: the variables, their older names, and exllamav3's function."""

import importlib.util
import logging
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_exl3 import env
from vllm_exl3.cuda import exllamav3_rows
from vllm_exl3.ops import backends
from vllm_exl3.ops.embedding import embedding_reference
from vllm_exl3.ops.ngram import NgramTable, ngram_reference
from vllm_exl3.pack.codec import decode_ngram
from vllm_exl3.tools.random_ngram import random_rows


@pytest.fixture(autouse=True)
def choose_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are made once a process; here each test makes its own."""
    monkeypatch.setattr(backends, "_choices", {})


@pytest.mark.parametrize(
    ("text", "installed", "chosen"),
    [
        ("auto", False, "auto"),
        ("native", False, "native"),
        ("torch", False, "reference"),
        ("exllamav3", False, "exllamav3"),
        ("ext", False, "native"),
        ("ext", True, "exllamav3"),
        ("EXT", False, "native"),
    ],
)
def test_ngram_kernels_by_all_their_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, installed: bool, chosen: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setenv("VLLM_EXL3_NGRAM_KERNEL", text)
    with caplog.at_level(logging.INFO, "vllm.exl3"):
        assert env.NGRAM_KERNEL.get() == chosen
    assert (f"ext means {chosen} here" in caplog.text) == (text.lower() == "ext")


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("512", 512), ("", 256)])
def test_the_cache_takes_mebibytes(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    monkeypatch.setenv("VLLM_EXL3_NGRAM_CACHE_MIB", text)
    assert env.NGRAM_CACHE_MIB.get() == value
    for wrong in ("-1", "1.5", "big"):
        monkeypatch.setenv("VLLM_EXL3_NGRAM_CACHE_MIB", wrong)
        with pytest.raises(ValueError, match="whole number from 0 to"):
            env.NGRAM_CACHE_MIB.get()


@pytest.mark.parametrize(
    ("op", "variable", "value", "reference"),
    [
        ("embedding", "VLLM_EXL3_EMBEDDING_KERNEL", "reference", embedding_reference),
        ("ngram", "VLLM_EXL3_NGRAM_KERNEL", "torch", ngram_reference),
    ],
)
def test_the_reference_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, op: str, variable: str, value: str, reference: Callable[..., object]
) -> None:
    monkeypatch.setenv(variable, value)
    choice = backends.select(op, "cpu", reference)
    assert choice.backend.name == "reference" and choice.backend.function is reference
    assert choice.declined == {"native": f"{variable}=reference"}


def test_a_kernel_that_cannot_run_is_refused_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_exl3.serving.embedding import QuantizedEmbeddingMethod, Table

    backends.select("embedding", "cpu", embedding_reference)
    missing = backends.Backend("embedding", "cpu", "native", embedding_reference, lambda: "no library here")
    monkeypatch.setattr(backends, "_backends", {("embedding", "cpu"): [missing]})
    monkeypatch.setattr(backends, "_choices", {})
    monkeypatch.setenv("VLLM_EXL3_EMBEDDING_KERNEL", "native")
    table = Table.of_integers("embed_tokens", 640, 8, 64, 1, torch.float32)
    layer = SimpleNamespace(num_added_embeddings=0, org_vocab_size=640, embedding_dim=64)
    with pytest.raises(RuntimeError, match="no library here"):
        QuantizedEmbeddingMethod("embed_tokens", table).create_weights(layer, 64, [640], 64, 640, torch.float32)


class Extension:
    """Stands for exllamav3's extension: checks what its function checks, and decodes by the numpy codec."""

    def ngram_dequant(
        self, packed: torch.Tensor, bits: int, heads: torch.Tensor, aux: torch.Tensor, out: torch.Tensor, rotate: bool
    ) -> None:
        assert (packed.dtype, heads.dtype, aux.dtype, out.dtype) == (
            torch.int16,
            torch.int32,
            torch.float16,
            torch.float16,
        )
        assert all(part.is_contiguous() for part in (packed, heads, aux, out)) and not rotate
        assert packed.shape[1] == 1 + 10 * bits and out.shape == (len(packed), 160) and len(heads) == len(packed)
        out.copy_(torch.from_numpy(decode_ngram(packed.numpy(), bits, aux.numpy()[heads.numpy()])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_through_exllamav3_s_function(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(exllamav3_rows, "_extension", Extension)
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(random_rows(300, 5, rng))
    table = NgramTable(torch.from_numpy(rng.uniform(-1, 1, (3, 160)).astype(np.float16)), torch.tensor([0, 90, 200]), 7)
    ids, index = (torch.from_numpy(rng.integers(0, 290, (5, 3))) for _ in range(2))
    for places in (None, index):
        ours, theirs = torch.empty((5, 3, 160), dtype=dtype), torch.empty((5, 3, 160), dtype=dtype)
        exllamav3_rows.ngram(ids, places, rows, table, ours)
        ngram_reference(ids, places, rows, table, theirs)
        assert torch.equal(ours, theirs)


def test_exllamav3_is_told_that_it_cannot_read_host_memory() -> None:
    table = NgramTable(torch.zeros((1, 160)).half(), torch.zeros(1, dtype=torch.int64), 0)
    ids = torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="VLLM_EXL3_NGRAM_TABLE"):
        exllamav3_rows.ngram(ids, None, torch.zeros((1, 51), dtype=torch.int16), table, torch.empty(1, 160))


def test_exllamav3_is_declined_where_it_is_not_installed() -> None:
    assert "not installed" in str(exllamav3_rows.unavailable())
