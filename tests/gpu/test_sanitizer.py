"""compute-sanitizer over small calls: no access beyond an allocation, no race in shared memory."""

import os
import re
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
RACE = re.compile(r"Race reported between (\w+) access at (\w+)\+0x(\w+)((?:\n.*and \w+ access at .*)+)")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("subject", ["linear", "moe"])
def test_nothing_is_found(subject: str, tool: str) -> None:
    work = [sys.executable, "-m", "tests.gpu.sanitized", subject]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    subprocess.run(work, cwd=ROOT, env=environment, check=True)  # compiles, and shows that it is right alone
    assert SANITIZER is not None
    # cuda-bindings asks the driver for functions that it may not have, which memcheck would report as errors.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else ["--racecheck-report", "analysis"]
    command = [SANITIZER, "--tool", tool, *options, "--error-exitcode", str(FOUND), "--print-limit", "100", *work]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine's GPU")
    assert "done" in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]
    if tool == "racecheck":
        assert not unexpected_races(done.stdout), done.stdout[-4000:]
        return
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:]


def unexpected_races(report: str) -> list[str]:
    """Races but those that are meant.

    In the narrow kernel one lane of one warp sets the block's role in a reduction (narrow/reduction.cuh), a word that
    the other warps read again and again as volatile: they may see it before or after. So one store a kernel, and reads.
    """
    found = [match.groups() for match in RACE.finditer(report)]
    said = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", report)
    assert said and int(said[1]) == len(found), "the report is not of the form that this test reads"
    return [
        f"{kind} {kernel}+0x{at}{others}"
        for kind, kernel, at, others in found
        if kind != "Write" or kernel != "exl3_narrow" or "Write" in others or others.count("exl3_narrow") > 2
    ]
