"""What gpu_moe_summary.py finds in timings of routed experts."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_moe_summary import MIXED, SUMMARY, UNIFORM, cliffs, summaries, table


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ({1: 10.0, 2: 10.0, 4: 10.0}, []),
        ({1: 10.0, 2: 24.0, 4: 57.0}, []),
        ({1: 10.0, 2: 24.1}, [(1, 2)]),
        ({256: 100.0, 512: 79.9, 1024: 100.0}, [(256, 512)]),
        ({512: 80.0, 256: 100.0}, []),
    ],
)
def test_cliffs_are_steps_down_and_steps_beyond_the_tokens(
    cells: dict[int, float], found: list[tuple[int, int]]
) -> None:
    assert cliffs(cells) == found


@given(st.dictionaries(st.integers(1, 10_000), st.floats(1, 1e6), min_size=2))
def test_time_in_proportion_to_tokens_has_no_cliffs_and_other_time_has_those_of_its_ratios(
    cells: dict[int, float],
) -> None:
    assert cliffs({m: 3.0 * m for m in cells}) == []
    wrong = cliffs(cells)
    scaled = cliffs({m: 8 * us for m, us in cells.items()})
    assert wrong == scaled


def rows(kernel: str, shape: str, us: dict[int, float]) -> list[dict[str, object]]:
    return [{"kernel": kernel, "shape": shape, "m": m, "us": value} for m, value in us.items()]


def test_mixing_is_held_against_one_rate_at_the_same_tokens() -> None:
    timed = [
        *rows("native", UNIFORM, {8: 100.0, 64: 200.0}),
        *rows("native", MIXED, {8: 104.0, 64: 190.0, 512: 300.0}),
        *rows("vllm_bf16", UNIFORM, {8: 1.0}),
    ]
    found = {row["shape"]: row for row in summaries(timed)}
    assert {row["kernel"] for row in found.values()} == {SUMMARY}
    assert found[f"{MIXED} over K5"]["ratios"] == {8: 1.04, 64: 0.95}
    assert found[UNIFORM]["least_step"] == 2.0
    assert found[UNIFORM]["most_step_per_token"] == 0.25


def test_the_table_names_others_by_how_many_times_as_long_they_take() -> None:
    timed = [*rows("native", "a", {1: 10.0, 8: 200.0}), *rows("exllamav3", "a", {1: 25.0})]
    line = next(line for line in table(timed) if line.startswith("| a "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "10.0 (2.50 / –)"
    assert cells[4] == "200"


def test_the_committed_timings_have_no_cliffs_and_mixing_costs_little() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "moe.json"
    timed = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = json.loads(json.dumps(summaries(timed)))
    assert [row for row in timed if row["kernel"] == SUMMARY] == found
    assert len(found) > 5
    assert not any(row.get("cliffs") for row in found)
    assert max(found[-1]["ratios"].values()) <= 1.05
