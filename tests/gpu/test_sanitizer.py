"""compute-sanitizer over small calls: no access beyond an allocation, no race in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
if SANITIZER is None:
    pytest.skip("needs compute-sanitizer, of CUDA's toolkit", allow_module_level=True)

ROOT = Path(__file__).parents[2]
FOUND = 9


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("subject", ["linear", "moe"])
def test_nothing_is_found(subject: str, tool: str) -> None:
    work = [sys.executable, "-m", "tests.gpu.sanitized", subject]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    subprocess.run(work, cwd=ROOT, env=environment, check=True)  # compiles, and shows that it is right alone
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *work]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine's GPU")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    summary = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}[tool]
    assert "done" in done.stdout and summary in done.stdout, done.stdout[-2000:]
