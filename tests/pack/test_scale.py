"""Opening a pack of many tensors stays quick and small; `benchmarks/open_pack.py` measures the full size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/open_pack.py"


@pytest.fixture(scope="module")
def benchmark_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("open_pack", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("files", [1, 4])
def test_thirty_thousand_tensors(files: int, benchmark_script: ModuleType, tmp_path: Path) -> None:
    header_bytes = benchmark_script.generate(tmp_path, 30_000, files)
    command = [sys.executable, "-c", benchmark_script.MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)})
    run = json.loads(done.stdout)
    assert run["tensors"] > 30_000 and header_bytes > 2_500_000
    assert run["warnings"] == 0
    assert run["open"] < 3, "a tenth of the tensors, in the time allowed for all"
    assert run["open_again"] < run["open"] / 5
    assert run["check_rss"] < 256 * 2**20
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 100 * 2**20, "the weights are a hole"
