"""vLLM's classes for GPUs load what a pack stores: every row of `gpu_rows`, built on a CPU beside its twin."""

import json
from pathlib import Path

import pytest

from tests.families.build_apart import build_apart
from tests.families.gpu_rows import GPU

RECORDED = Path(__file__).with_name("built.json")
NAMES = [family.name for family in GPU]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_class_for_gpus_loads_the_pack(name: str) -> None:
    found = build_apart(name)
    assert found.get("differ") == [], found
    assert found["exl3"] + found["experts"] >= 2 and found["parameters"] >= 4, found


def test_every_row_was_recorded_as_loaded() -> None:
    recorded = {row["name"]: row for row in json.loads(RECORDED.read_text())}
    assert sorted(recorded) == sorted(NAMES)
    assert [name for name, row in recorded.items() if row.get("differ") != []] == []
