"""What `bench --compare` calls a change, and files that are no results."""

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_exl3.cli.bench_output import finish
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.tools.compare import changes, measured
from vllm_exl3.tools.results import check_results_file, read_results, write_results

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def _row(name: str, each: list[float], **identity: Any) -> dict[str, Any]:
    return {"kernel": "native", "in": 256, "bits": 4, **identity, **measured(name, each)}


@pytest.mark.parametrize(
    ("name", "before", "now", "found"),
    [
        ("us", [10.0, 10.1, 9.9], [10.05, 10.0, 9.95], None),
        ("us", [10.0, 10.1, 9.9], [12.0, 12.1, 11.9], False),
        ("us", [10.0, 12.0, 8.0], [12.0, 14.0, 10.0], None),  # as far apart, but within what repeats differ
        ("tokens_per_second", [10.0, 10.1, 9.9], [12.0, 12.1, 11.9], True),
        ("us", [10.0, 10.0, 10.0], [10.05, 10.05, 10.05], None),  # half a percent is nothing, however still it was
        ("us", [10.0], [10.4], None),  # without repeats 5 %
        ("us", [10.0], [9.4], True),
    ],
)
def test_a_change_is_what_repeats_do_not_explain(
    name: str, before: list[float], now: list[float], found: bool | None
) -> None:
    moved, compared = changes([_row(name, before)], [_row(name, now)])
    assert compared == 1
    assert [change.better for change in moved] == ([] if found is None else [found])


@pytest.mark.parametrize("counts", [(2, 2), (3, 3), (2, 9), (10, 3)])
def test_equal_machines_seldom_differ(counts: tuple[int, int]) -> None:
    chance = random.Random(0)
    rows = [[_row("us", [chance.gauss(100, 5) for _ in range(count)], m=m) for m in range(1000)] for count in counts]
    moved, compared = changes(*rows)
    assert compared == 1000 and len(moved) <= 20


def test_a_number_that_is_lost_or_found_is_a_change() -> None:
    nan, row = float("nan"), _row("us", [10.0, 10.1])
    lost, found = ([{**row, "us": value}] for value in (nan, None))
    for other in (lost, found):
        (change,) = changes([row], other)[0]
        assert not change.better and "nan" in change.line()
        (change,) = changes(other, [row])[0]
        assert change.better
        assert changes(other, other) == ([], 0)
    huge = [{**row, "us": 10**400}]
    assert len(changes([row], huge)[0]) == 1
    odd = [{**row, "us": 10.2, "us_each": "fast"}]
    assert changes([row], odd) == ([], 1)


def test_rows_are_matched_by_their_settings() -> None:
    before = [_row("us", [10.0], m=m) | {"commit": "a", "limit_us": 1.0} for m in (1, 2)]
    now = [_row("us", [20.0], m=2.0) | {"limit_us": 2.0}, _row("us", [1.0], m=4)]
    moved, compared = changes(before, now)
    assert compared == 1 and "m=2" in moved[0].row and moved[0].line().startswith("worse")


def test_no_two_rows_of_a_committed_file_measure_the_same() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 20
    compared = 0
    for file in files:
        rows = read_results(file)["rows"]
        moved, count = changes(rows, rows)
        compared += count
        assert not moved, file  # a row would have been compared with another one of the same settings
    assert compared > 6000


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "", "5", "[" * 9999, '{"meta": {}}', '{"meta": {}, "rows": [1]}', '{"meta": {}, "rows": 1}',
     '{"schema": 2, "meta": {}, "rows": []}', '{"schema": "1", "meta": {}, "rows": []}', None],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(Exl3PackError, match="results file"):
        read_results(file)


def test_results_are_written_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "now.json"
    baseline = {"meta": {}, "rows": [_row("us", [10.0, 10.0])]}
    finish([_row("us", [20.0, 20.0])], file, baseline, gpu=False)
    written = read_results(file)
    assert written["schema"] == 1 and written["meta"]["machine"] == "cpu" and written["meta"]["commit"] is None
    assert written["rows"][0]["us_each"] == [20.0, 20.0]
    said = capsys.readouterr().out
    assert "worse  kernel=native in=256 bits=4: us 10 -> 20 (+100.0%" in said and "1 of 1 measures moved" in said
    finish([_row("us", [20.0], m=3)], None, baseline, gpu=False)
    assert "no row of the same settings" in capsys.readouterr().out


def test_a_baseline_is_read_before_anything_is_measured(tmp_path: Path) -> None:
    from vllm_exl3.cli import app

    for command in (["linear"], ["moe"], ["kv"]):
        result = CliRunner().invoke(app, ["bench", *command, "--compare", str(tmp_path / "none.json")])
        assert isinstance(result.exception, Exl3PackError), result.output


@pytest.mark.parametrize("command", [["linear"], ["moe"], ["kv"], ["load", "none"], ["serve", "none"]])
def test_a_file_of_something_else_is_refused_before_anything_is_measured(tmp_path: Path, command: list[str]) -> None:
    from vllm_exl3.cli import app

    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    result = CliRunner().invoke(app, ["bench", *command, "--json", str(file)])
    assert isinstance(result.exception, Exl3PackError) and "config.json" in str(result.exception), result.output
    result = CliRunner().invoke(app, ["bench", *command, "--json", str(file / "below.json")])
    assert isinstance(result.exception, NotADirectoryError), result.output
    assert file.read_text() == '{"model_type": "llama"}'


def test_what_is_not_finite_is_null_in_a_file_that_anything_can_read(tmp_path: Path) -> None:
    file = tmp_path / "now.json"
    file.touch()
    check_results_file(file)  # an empty file is no file of something else
    write_results(file, [{"us": float("nan"), "us_each": [1.0, float("inf")]}], machine="cpu", command="x")
    assert "NaN" not in file.read_text() and read_results(file)["rows"] == [{"us": None, "us_each": [1.0, None]}]
