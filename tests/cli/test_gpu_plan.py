"""`benchmarks/gpu_plan.py` as far as it runs without a GPU: six kinds of packs, plans of each, and what a row says."""

from pathlib import Path

import pytest

from benchmarks.gpu_plan import ALLOWED, KINDS, planned, row, write_kind
from vllm_exl3.pack.pack import Pack

GIB = 1 << 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_comes_true_has_no_error(kind: str, tmp_path: Path) -> None:
    pack = Pack.open(write_kind(kind, tmp_path, hollow=True))
    plan = planned(kind, pack, 140 * GIB)
    (rank,) = plan.ranks
    assert plan.fits and rank.budget < 30 * GIB
    true = {"model_bytes": rank.placement.gpu, "kv_bytes": rank.cache_bytes, "kv_tokens": 0}
    found = row(kind, pack, plan, true)
    assert found["error"] == 0
    assert found["tokens_of_these_bytes"] == plan.capacity[plan.wish.cache_type].tokens  # type: ignore[union-attr]
    off = row(kind, pack, plan, {**true, "kv_bytes": rank.cache_bytes - int(1.01 * ALLOWED * rank.budget)})
    assert off["error"] > ALLOWED


def test_kinds_differ() -> None:
    assert len(KINDS) == 6
