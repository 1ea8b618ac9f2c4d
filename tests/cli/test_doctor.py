"""What the commands around kernels say on a machine that serves on its CPU."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One `vllm-exl3` command."""
    command = [sys.executable, "-m", "vllm_exl3.cli", *arguments]
    settings = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


def test_a_cpu_that_serves_is_no_failure() -> None:
    found = run("doctor")
    assert found.returncode == 0, found.stdout
    assert "27 kinds" in found.stdout and "FAIL" not in found.stdout
    assert "a tested release; all" in found.stdout


@pytest.mark.parametrize(
    ("variable", "value"), [("VLLM_EXL3_LINEAR_KERNEL", "natvie"), ("VLLM_EXL3_CPU_ISA", "avx1024")]
)
def test_a_mistyped_variable_fails_without_a_traceback(variable: str, value: str) -> None:
    found = run("doctor", **{variable: value})
    assert found.returncode == 1 and f"{variable}='{value}'" in found.stdout
    assert "Traceback" not in found.stderr


def test_an_architecture_that_does_not_exist_is_a_usage_error() -> None:
    found = run("precompile", "--arch", "sm_999")
    assert found.returncode == 2 and "sm_90a" in found.stderr
    assert "Traceback" not in found.stderr
