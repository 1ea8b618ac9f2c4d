"""Pipeline parallelism: two stages, each in a process of its own, give one stage's tokens."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.conftest import PACKS
from tests.serving.engine import PROMPTS, engine, generate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["llama_odd-4.0-mul1", "qwen3_moe-3.0-mul1"])
def test_two_stages_give_one_stages_tokens(name: str) -> None:
    with engine(PACKS / name) as llm:
        expected = generate(llm, PROMPTS, 24)
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
    }
    command = [sys.executable, str(root / "tests" / "serving" / "stages.py"), str(PACKS / name)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r"TOKENS (.*)", output.stdout)
    assert found, output.stdout[-1000:] + output.stderr[-3000:]
    assert json.loads(found[1]) == expected
