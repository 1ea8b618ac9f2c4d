"""The kernels compile for GPUs that are not here, with the Triton that is installed."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 86, 89, 100, 120))])
def test_kernels_compile(capability: int, tmp_path: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attention.compile_kernels", str(capability)]
    result = subprocess.run(
        command, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"compiled {capability}" in result.stdout
