"""Runs of benchmarks/soak.py add up in its results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "benchmarks" / "soak.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requests_and_hours_of_runs_add_up(soak: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    for number, row in enumerate(({"requests": 100, "seconds": 1800}, {"requests": 11, "seconds": 900}), start=1):
        total = soak.record(path, row, "python benchmarks/soak.py")
        assert total["total_runs"] == number
    results = json.loads(path.read_text())
    assert [row["requests"] for row in results["rows"]] == [100, 11]
    assert total == {"total_runs": 2, "total_requests": 111, "total_hours": 0.75}
    assert total.items() <= results["meta"].items()
