"""vLLM's classes for GPUs load what a pack stores: every row of `gpu_rows`, built on a CPU beside its twin."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from scripts.vllm_tree import make_tree
from tests.families.gpu_rows import GPU

ROOT = Path(__file__).parents[2]
LATER = {"flint": "0.33.0"}
"""Rows whose class only a later release has."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [family.name for family in GPU])
def test_a_class_for_gpus_loads_the_pack(name: str) -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if name in LATER and not vllm.__version__.startswith(LATER[name]):
        paths.insert(0, str(make_tree(LATER[name])))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "tests.families.built", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    match = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    assert match, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(match[1])
    assert found.get("differ") == [], found
    assert found["exl3"] + found["experts"] >= 2 and found["parameters"] >= 4, found
