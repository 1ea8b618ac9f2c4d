"""The n-gram op against the numpy codec, bit for bit, for every K, dtype and place of the table."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_pack import llama
from vllm_exl3.ops import backends
from vllm_exl3.ops import ngram as module
from vllm_exl3.ops.ngram import NgramTable, ngram_reference, register_table
from vllm_exl3.ops.ngram_tables import DiskTable, MemoryTable, PinnedRows, fill
from vllm_exl3.pack import Pack
from vllm_exl3.pack.codec import decode_ngram
from vllm_exl3.pack.ngram import read_heads
from vllm_exl3.pack.ngram_rows import NgramRows
from vllm_exl3.tools.random_ngram import random_rows, write_ngram_table

KEY = "model.layers.1.ple.ple_embedding.ngram_embedding"
SIZES = (300, 401, 250)


def random_table(bits: int, rows: int = 1000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Code, biases of the heads, and their first rows."""
    rng = np.random.default_rng(seed)
    bias = rng.uniform(-0.02, 0.02, (len(SIZES), 160)).astype(np.float16)
    return random_rows(rows, bits, rng), bias, np.concatenate([[0], np.cumsum(SIZES)[:-1]])


def wanted(code: np.ndarray, bias: np.ndarray, offsets: np.ndarray, ids: np.ndarray, first: int = 0) -> torch.Tensor:
    heads = np.searchsorted(offsets, ids + first, side="right") - 1
    bits = (code.shape[1] - 1) // 10
    return torch.from_numpy(decode_ngram(code[ids.ravel()], bits, bias[heads.ravel()])).view(*ids.shape, 160)


def table_of(code: np.ndarray, bias: np.ndarray, offsets: np.ndarray, first: int = 0) -> MemoryTable:
    return MemoryTable(*(torch.from_numpy(part) for part in (code, bias, offsets)), first)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_every_k_are_the_specification_s(bits: int, dtype: torch.dtype) -> None:
    code, bias, offsets = random_table(bits)
    ids = np.random.default_rng(1).integers(0, 1000, (37, 6))
    ids[0] = [0, 299, 300, 700, 701, 999]
    out = torch.full((37, 6, 160), torch.nan, dtype=dtype)
    table_of(code, bias, offsets)(torch.from_numpy(ids), out)
    assert torch.equal(out, wanted(code, bias, offsets, ids).to(dtype))


def test_a_rank_s_share_has_the_biases_of_its_heads() -> None:
    code, bias, offsets = random_table(5)
    ids = np.arange(450)
    out = torch.empty((450, 160), dtype=torch.float16)
    table_of(code[500:], bias, offsets, 500)(torch.from_numpy(ids), out)
    assert torch.equal(out, wanted(code[500:], bias, offsets, ids, 500))
    assert not torch.equal(out, wanted(code[500:], bias, offsets, ids, 0))


def test_more_rows_than_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    code, bias, offsets = random_table(3)
    table = table_of(code, bias, offsets)
    whole, parts = (torch.empty((500, 160)) for _ in range(2))
    ids = torch.arange(500)
    ngram_reference(ids, None, table.rows, table, whole)
    monkeypatch.setattr(module, "_DECODED_ROWS", 77)
    ngram_reference(ids, None, table.rows, table, parts)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("shards", [0, 3])
def test_a_table_on_disk_gives_what_one_in_memory_gives(tmp_path: Path, shards: int) -> None:
    folder = llama().write(tmp_path)
    write_ngram_table(
        folder / "ngram_table.safetensors", KEY,
        rows=1000, bits=5, head_sizes=SIZES, multipliers=(3, 5), shards=shards,
    )  # fmt: skip
    pack = Pack.open(folder)
    stored = pack.ngram_tables[KEY]
    heads = read_heads(pack, stored)
    bias, offsets = torch.from_numpy(heads.bias), torch.from_numpy(heads.offsets)
    rows = torch.zeros((500, 51), dtype=torch.int16)
    fill(rows, NgramRows(pack, stored), 400)
    memory, disk = (
        MemoryTable(rows, bias, offsets, 400),
        DiskTable(NgramRows(pack, stored, 10_000), bias, offsets, 400),
    )
    for seed in range(4):
        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 500, (90, 3)))
        first, second = torch.empty((90, 3, 160)), torch.empty((90, 3, 160))
        memory(ids, first)
        disk(ids, second)
        assert torch.equal(first, second)
    beyond = torch.full((300, 51), 9, dtype=torch.int16)
    fill(beyond, NgramRows(pack, stored), 900)
    assert torch.equal(beyond[:100], rows.new_tensor(NgramRows(pack, stored).gather(np.arange(900, 1000))))
    assert (beyond[100:] == 9).all()


def test_each_distinct_row_is_read_once(tmp_path: Path) -> None:
    folder = llama().write(tmp_path)
    write_ngram_table(folder / "n.safetensors", KEY, rows=1000, bits=5, head_sizes=SIZES, multipliers=(3, 5))
    pack = Pack.open(folder)
    heads = read_heads(pack, pack.ngram_tables[KEY])
    reader = NgramRows(pack, pack.ngram_tables[KEY])
    disk = DiskTable(reader, torch.from_numpy(heads.bias), torch.from_numpy(heads.offsets), 0)
    disk(torch.tensor([[5, 5, 5], [900, 5, 900]]), torch.empty((2, 3, 160)))
    assert reader.bytes_read == 2 * 102


def test_the_op_writes_what_its_layer_s_table_gives() -> None:
    code, bias, offsets = random_table(4)
    table = table_of(code, bias, offsets)
    register_table("layer", table)
    ids = torch.tensor([[1, 2], [998, 301]])
    out = torch.empty((2, 2, 160))
    backends.reset_calls()
    torch.ops.vllm.exl3_ngram_lookup_out(ids, out, "layer")
    assert torch.equal(out, wanted(code, bias, offsets, ids.numpy()).float())
    assert any(op == "ngram" for op, _, _ in backends.calls())
    torch.library.opcheck(torch.ops.vllm.exl3_ngram_lookup_out.default, (ids, out, "layer"))


def test_a_table_goes_with_the_layer_that_keeps_it() -> None:
    table = table_of(*random_table(4))
    rows = weakref.ref(table.rows)
    register_table("gone", table)
    torch.ops.vllm.exl3_ngram_lookup_out(torch.tensor([1]), torch.empty((1, 160)), "gone")
    del table
    gc.collect()
    assert rows() is None
    with pytest.raises(RuntimeError, match=r"no table of layer 'gone' .* goes with it"):
        torch.ops.vllm.exl3_ngram_lookup_out(torch.tensor([1]), torch.empty((1, 160)), "gone")


def test_layers_of_equal_names_in_two_models_keep_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {model: table_of(*random_table(4, seed=model)) for model in (1, 2)}
    ids, own = torch.arange(0, 900, 90), {}
    for model, table in tables.items():
        register_table("shared", table, model)
        table(ids, rows := torch.empty((10, 160)))
        own[model] = rows
    assert not torch.equal(own[1], own[2])
    for running, wanted_rows in ((1, own[1]), (2, own[2]), (1, own[1]), (None, own[2])):
        monkeypatch.setattr(module, "_running_model", lambda running=running: running)
        torch.ops.vllm.exl3_ngram_lookup_out(ids, out := torch.empty((10, 160)), "shared")
        assert torch.equal(out, wanted_rows)
    monkeypatch.setattr(module, "_running_model", lambda: 3)
    with pytest.raises(RuntimeError, match=r"no table of layer 'shared' of model 3"):
        torch.ops.vllm.exl3_ngram_lookup_out(ids, torch.empty((10, 160)), "shared")


def test_pinned_rows_are_ordinary_memory_without_a_gpu() -> None:
    rows = PinnedRows(7, 51)
    assert rows.tensor.shape == (7, 51) and rows.tensor.dtype == torch.int16


@pytest.mark.parametrize("fault", ["bias", "row", "bit"])
def test_the_comparison_sees_one_wrong_bias_row_or_bit(fault: str) -> None:
    code, bias, offsets = random_table(5)
    ids = np.array([5, 400])
    right = wanted(code, bias, offsets, ids)
    if fault == "bias":
        bias[1, 9] += np.float16(0.001)
    elif fault == "row":
        code[5] = code[6]
    else:
        code[400, 7] ^= 1
    out = torch.empty((2, 160), dtype=torch.float16)
    table = NgramTable(torch.from_numpy(bias), torch.from_numpy(offsets), 0)
    ngram_reference(torch.from_numpy(ids), None, torch.from_numpy(code), table, out)
    assert not torch.equal(out, right)
