"""What ``benchmarks/gpu_two.py`` says of two GPUs against one: it must be able to fail."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.two_compare import compare, reference_of

PACK = "llama_tied-3.0-mul1"
STATE = {"device": "cuda:0", "weight_bytes": 1, "calls": {"linear native": 3}}
LOGITS = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
TOKENS, GAPS = [[1, 2, 3], [4, 5, 6]], [[1.0, 0.001, 1.0], [1.0, 1.0, 1.0]]


def save(work: Path, name: str, tokens: list[list[int]] = TOKENS, logits: np.ndarray = LOGITS, **rest: Any) -> Path:
    path = work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"tokens": tokens, "gaps": GAPS, "ranks": [STATE, STATE], "seconds": {"start": 1.0}, **rest}
    np.savez(path, logits=logits, rest=np.array(json.dumps(content)))
    return path


@pytest.mark.parametrize(
    ("tokens", "noise", "ok", "equal"),
    [
        (TOKENS, 0.0, True, 6),
        (TOKENS, 1e-3, True, 6),
        (TOKENS, 1e-2, False, 6),
        ([[1, 9, 9], [4, 5, 6]], 0.0, True, 4),  # where one GPU's two best were as good as equal
        ([[1, 2, 3], [4, 9, 6]], 0.0, False, 4),
        ([[9, 2, 3], [4, 5, 6]], 0.0, False, 3),
    ],
)
def test_tokens_and_logits(tmp_path: Path, tokens: list[list[int]], noise: float, ok: bool, equal: int) -> None:
    save(tmp_path, f"one/{PACK}.npz")
    row = compare(save(tmp_path, f"tp2/{PACK}.npz", tokens, LOGITS * (1 + noise)), tmp_path)
    assert (row["ok"], row["tokens"], row["equal_tokens"]) == (ok, 6, equal)
    assert (row["pack"], row["mode"], row["kernel"], len(row["rank_states"])) == (PACK, "tp2", "native", 2)


def test_a_rank_of_data_parallelism_is_compared_with_the_packs_own_tokens(tmp_path: Path) -> None:
    save(tmp_path, f"one/{PACK}.npz")
    row = compare(save(tmp_path, f"dp2/{PACK}.1.npz", [[9, 9, 9], [4, 5, 6]]), tmp_path)
    assert (row["mode"], row["pack"], row["ok"]) == ("dp2 rank 1", PACK, False)


def test_an_engine_that_failed_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "tp2").mkdir()
    (tmp_path / f"tp2/{PACK}.failed").write_text("RuntimeError: no")
    row = compare(tmp_path / f"tp2/{PACK}.failed", tmp_path)
    assert (row["ok"], row["failed"], row["pack"]) == (False, "RuntimeError: no", PACK)


def test_a_kernel_that_is_not_native_shows(tmp_path: Path) -> None:
    slow = {**STATE, "calls": {"linear reference": 1}}
    row = compare(save(tmp_path, f"one/{PACK}.npz", ranks=[STATE, slow]), tmp_path)
    assert row["kernel"] == "native+reference"


@pytest.mark.parametrize(
    ("variant", "reference"),
    [("tp2", "one"), ("tp2-int4", "one-int4"), ("one-int4-graphs", "one-int4"), ("one-graphs", "one")],
)
def test_int4_caches_are_compared_with_int4_caches(variant: str, reference: str) -> None:
    assert reference_of(variant) == reference
