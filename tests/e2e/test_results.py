"""Results files: rows are replaced by what is measured anew, and the others keep the commit they were measured at."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_exl3.tools import results


def write(path: Path, commit: str | None, monkeypatch: pytest.MonkeyPatch, **row: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(results, "measured_on", lambda machine, command: {"machine": machine, "commit": commit})
    results.write_results(path, [row], machine="cpu", command="x", replaces=lambda old: old["m"] == row["m"])
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_kept_rows_name_the_commit_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "subject.json"
    assert write(path, "a", monkeypatch, m=1, us=5) == [{"m": 1, "us": 5}]
    assert write(path, "a", monkeypatch, m=2, us=6) == [{"m": 1, "us": 5}, {"m": 2, "us": 6}]
    assert write(path, "b", monkeypatch, m=2, us=7) == [{"commit": "a", "m": 1, "us": 5}, {"m": 2, "us": 7}]
    assert write(path, "c", monkeypatch, m=3, us=8) == [
        {"commit": "a", "m": 1, "us": 5},
        {"commit": "b", "m": 2, "us": 7},
        {"m": 3, "us": 8},
    ]


def test_a_commit_that_was_not_known_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "subject.json"
    write(path, None, monkeypatch, m=1)
    assert write(path, "b", monkeypatch, m=2) == [{"m": 1}, {"m": 2}]
