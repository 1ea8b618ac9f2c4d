"""N-gram tables: the hash against a plain loop, rows against what was written, the cache, and every refusal."""

import itertools
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_pack import Draft, llama
from vllm_exl3.pack import Pack
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.ngram import NgramHeads, ngram_ids, read_heads
from vllm_exl3.pack.ngram_rows import NgramRows
from vllm_exl3.pack.row_cache import RowCache
from vllm_exl3.tools.random_ngram import write_ngram_table

KEY = "model.layers.1.ple.ple_embedding.ngram_embedding"
EOS = 2
MULTIPLIERS = (6148914691236517205, 3074457345618258603, 9007199254740993)


def heads_of(sizes: list[int], multipliers: tuple[int, ...]) -> NgramHeads:
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    bias = np.zeros((len(sizes), 160), np.float16)
    return NgramHeads(bias, offsets, np.array(sizes), np.array(multipliers, np.int64))


def wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def ids_by_loop(tokens: list[int], heads: NgramHeads) -> list[list[int]]:
    """The specification in Python's integers, one position at a time."""
    multipliers = [int(value) for value in heads.multipliers]
    per_ngram = len(heads.sizes) // (len(multipliers) - 1)
    rows = []
    for position in range(len(tokens)):
        ends = [at for at in range(position) if tokens[at] == EOS]
        last = ends[-1] if ends else -1
        row = []
        for head, (size, offset) in enumerate(zip(heads.sizes, heads.offsets, strict=True)):
            mixed = 0
            for back in range(head // per_ngram + 2):
                source = position - back
                token = tokens[source] if back == 0 or source > last else EOS
                mixed ^= wrap(token * multipliers[back])
            row.append(mixed % int(size) + int(offset))
        rows.append(row)
    return rows


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.just(EOS), st.integers(0, 300_000)), max_size=24),
    st.integers(2, 3),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_the_hash_is_the_specification_s(tokens: list[int], ngram: int, per_ngram: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5000, (ngram - 1) * per_ngram).tolist()
    heads = heads_of(sizes, tuple(rng.integers(1, 2**63 - 1, ngram).tolist()))
    ids = ngram_ids(tokens, heads, EOS)
    assert ids.shape == (len(tokens), len(sizes))
    assert ids.tolist() == ids_by_loop(tokens, heads)
    assert (heads.head_of(ids) == np.arange(len(sizes))).all()


def table(tmp_path: Path, *, shards: int = 0, rows: int = 1000, files: int = 1, **options: object) -> tuple[Pack, dict]:
    folder = llama().write(tmp_path)
    code = write_ngram_table(
        folder / "ngram_table.safetensors", KEY,
        rows=rows, bits=5, head_sizes=(400, 590), multipliers=MULTIPLIERS, shards=shards, **options,
    )  # fmt: skip
    return Pack.open(folder), code


@pytest.mark.parametrize("shards", [0, 1, 3, 7])
@pytest.mark.parametrize("cache", [0, 5000, 1 << 20])
def test_rows_come_as_they_were_written_in_any_layout(tmp_path: Path, shards: int, cache: int) -> None:
    pack, code = table(tmp_path, shards=shards)
    stored = pack.ngram_tables[KEY]
    assert (len(stored.shards), stored.rows, stored.bits) == (max(1, shards), 1000, 5)
    rows = NgramRows(pack, stored, cache)
    rng = np.random.default_rng(1)
    for _ in range(6):
        ids = np.unique(rng.integers(0, 1000, 150))
        assert np.array_equal(rows.gather(ids), np.stack([code[number] for number in ids]))
    assert rows.gather(np.empty(0, np.int64)).shape == (0, 51)


def test_shards_in_several_files(tmp_path: Path) -> None:
    draft = llama()
    rng = np.random.default_rng(3)
    whole = rng.integers(-(2**15), 2**15, (1000, 51)).astype(np.int16)
    for shard, first in enumerate(range(0, 1000, 300)):
        name = f"{KEY}.shard_{shard}.trellis"
        draft.tensors[name] = ("I16", whole[first : first + 300])
        draft.file_of[name] = f"ngram_table-{shard % 2}.safetensors"
    draft.tensors[f"{KEY}.head_bias"] = ("F16", np.ones((1, 160)))
    pack = Pack.open(draft.write(tmp_path))
    rows = NgramRows(pack, pack.ngram_tables[KEY])
    ids = np.array([0, 1, 299, 300, 301, 599, 600, 899, 900, 999])
    assert np.array_equal(rows.gather(ids), whole[ids])
    for first, last in ((0, 1000), (250, 950), (300, 600), (999, 1000), (5, 5)):
        parts = [(row, part.copy()) for row, part in rows.chunks(first, last, 51 * 2 * 37)]
        assert [row for row, _ in parts] == list(
            itertools.accumulate([len(part) for _, part in parts[:-1]], initial=first)
        )[: len(parts)]
        assert sum(len(part) for _, part in parts) == last - first
        if parts:
            assert np.array_equal(np.concatenate([part for _, part in parts]), whole[first:last])


@pytest.mark.parametrize("ids", [[-1], [1000], [2**40], [-5, 3], [3, 1000]])
def test_a_row_outside_the_table_is_an_error_and_is_not_kept(tmp_path: Path, ids: list[int]) -> None:
    pack, _ = table(tmp_path)
    rows = NgramRows(pack, pack.ngram_tables[KEY], 1 << 20)
    with pytest.raises(IndexError, match="of a table of 1000"):
        rows.gather(np.array(ids))
    assert rows.bytes_read == 0


def test_a_cache_has_no_more_places_than_the_table_fills(tmp_path: Path) -> None:
    pack, _ = table(tmp_path)
    rows = NgramRows(pack, pack.ngram_tables[KEY], (2**31 - 1) << 20)
    rows.gather(np.arange(1000))
    assert np.array_equal(rows.gather(np.arange(1000)), NgramRows(pack, pack.ngram_tables[KEY]).gather(np.arange(1000)))


def test_threads_share_a_cache_without_taking_each_other_s_rows(tmp_path: Path) -> None:
    pack, code = table(tmp_path)
    whole = np.stack([code[number] for number in range(1000)])
    rows = NgramRows(pack, pack.ngram_tables[KEY], 30 * RowCache.place_bytes(51))

    def wrong(seed: int) -> int:
        rng = np.random.default_rng(seed)
        batches = (np.unique(rng.integers(0, 1000, 40)) for _ in range(1000))
        return sum(not np.array_equal(rows.gather(ids), whole[ids]) for ids in batches)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(wrong, range(4))) == 0
    finally:
        sys.setswitchinterval(interval)


def test_a_row_is_read_once_while_the_cache_has_room(tmp_path: Path) -> None:
    pack, _ = table(tmp_path)
    rows = NgramRows(pack, pack.ngram_tables[KEY], 1 << 20)
    ids = np.array([1, 5, 900])
    rows.gather(ids)
    assert rows.bytes_read == 3 * 102
    rows.gather(ids)
    rows.gather(np.array([1, 2, 5]))
    assert rows.bytes_read == 4 * 102


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 4000), st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=40, unique=True), max_size=8)
)
def test_the_cache_never_gives_another_row(nbytes: int, batches: list[list[int]]) -> None:
    cache = RowCache(nbytes, 4)
    assert cache.places * (2 * 4 + 8) <= nbytes
    for batch in batches:
        ids = np.array(sorted(batch))
        values = (ids[:, None] * 7 + np.arange(4)).astype(np.int16)
        out = np.full((len(ids), 4), -9, np.int16)
        found = cache.get(ids, out)
        assert np.array_equal(out[found], values[found]) and (out[~found] == -9).all()
        cache.put(ids, values)
    if batches and cache.places:
        assert cache.get(ids, out).any()


def test_a_sparse_table_of_millions_of_rows_stays_on_disk(tmp_path: Path) -> None:
    numbers = [0, 1, 41_000_000, 199_999_999, *range(77_000_000, 77_020_000)]
    pack, code = table(tmp_path, rows=200_000_000, shards=16, filled=numbers)
    size = (tmp_path / "ngram_table.safetensors").stat()
    assert size.st_size > 20e9 and size.st_blocks * 512 < 50e6
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = NgramRows(pack, pack.ngram_tables[KEY], 8 << 20)
    ids = np.unique(numbers)
    assert np.array_equal(rows.gather(ids), np.stack([code[number] for number in ids]))
    assert not rows.gather(np.array([2, 100_000_000])).any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024


def set_tensor(leaf: str, values: np.ndarray) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.tensors[f"{KEY}.{leaf}"] = (draft.tensors[f"{KEY}.{leaf}"][0], values)

    return change


def drop(leaf: str) -> Callable[[Draft], None]:
    return lambda draft: draft.tensors.pop(f"{KEY}.{leaf}") and None


def wrapped_ranges(draft: Draft) -> None:
    """Sizes whose sums in int64 come back to a small number."""
    most = 2**63 - 1
    draft.tensors[f"{KEY}.head_bias"] = ("F16", np.ones((4, 160), np.float16))
    draft.tensors[f"{KEY}.head_offsets"] = ("I64", np.array([0, most, -2, 10]))
    draft.tensors[f"{KEY}.head_vocab_sizes"] = ("I64", np.array([most, most, 12, 50]))


def nan_bias(draft: Draft) -> None:
    draft.tensors[f"{KEY}.head_bias"][1][1, 3] = np.nan


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop("head_offsets"), "no .head_offsets"),
        (drop("head_vocab_sizes"), "no .head_vocab_sizes"),
        (set_tensor("head_offsets", np.array([0, 41])), "follow each other"),
        (set_tensor("head_offsets", np.array([1, 41])), "follow each other"),
        (set_tensor("head_vocab_sizes", np.array([40, 61])), "100 stored rows"),
        (set_tensor("head_vocab_sizes", np.array([40, 0])), "follow each other"),
        (set_tensor("head_vocab_sizes", np.array([40, -40])), "follow each other"),
        (wrapped_ranges, "follow each other"),
        (set_tensor("head_offsets", np.array([0, 40, 80])), "one a head"),
        (set_tensor("layer_multipliers", np.array([1, 2, 3, 4])), "as many heads for each"),
        (set_tensor("layer_multipliers", np.array([1])), "as many heads for each"),
        (nan_bias, "NaN"),
    ],
)
def test_small_tensors_that_contradict_the_table(tmp_path: Path, fault: Callable[[Draft], None], message: str) -> None:
    draft = llama()
    draft.tensors[f"{KEY}.trellis"] = ("I16", np.zeros((100, 51)))
    draft.tensors[f"{KEY}.head_bias"] = ("F16", np.ones((2, 160), np.float16))
    draft.tensors[f"{KEY}.head_offsets"] = ("I64", np.array([0, 40]))
    draft.tensors[f"{KEY}.head_vocab_sizes"] = ("I64", np.array([40, 50]))
    draft.tensors[f"{KEY}.layer_multipliers"] = ("I64", np.array([3, 5]))
    pack = Pack.open(draft.write(tmp_path / "good"))
    heads = read_heads(pack, pack.ngram_tables[KEY])
    assert heads.rows == 90 and heads.head_of(np.array([0, 39, 40, 99])).tolist() == [0, 0, 1, 1]
    fault(draft)
    pack = Pack.open(draft.write(tmp_path / "bad"))
    with pytest.raises(Exl3PackError, match=message):
        read_heads(pack, pack.ngram_tables[KEY])


def test_a_short_shard_that_is_not_the_last_is_refused(tmp_path: Path) -> None:
    draft = llama()
    for shard, rows in enumerate((4, 3, 4)):
        draft.tensors[f"{KEY}.shard_{shard}.trellis"] = ("I16", np.zeros((rows, 51)))
    draft.tensors[f"{KEY}.head_bias"] = ("F16", np.ones((2, 160)))
    with pytest.raises(Exl3PackError, match="fewer in the last shard only"):
        Pack.open(draft.write(tmp_path))


@pytest.mark.parametrize("shards", [0, 4])
def test_a_file_that_shrank_is_refused(tmp_path: Path, shards: int) -> None:
    pack, _ = table(tmp_path, shards=shards)
    file = tmp_path / "ngram_table.safetensors"
    file.write_bytes(file.read_bytes()[:50_000])
    with pytest.raises(Exl3PackError, match="fewer than when its header was read"):
        NgramRows(pack, pack.ngram_tables[KEY])
