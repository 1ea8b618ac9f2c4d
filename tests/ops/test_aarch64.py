"""The NEON kernels, under emulation: compiled by Debian's cross compiler, run by QEMU, compared with scalar code."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
SOURCES = [
    *(f"csrc/cpu/{name}.cpp" for name in ("abi", "decode", "encode", "isa", "linear", "moe", "moe_check", "moe_plan")),
    *(f"csrc/cpu/{name}.cpp" for name in ("parallel", "pool", "rings", "rows")),
    *("csrc/cpu/kernels_scalar.cpp", "csrc/cpu/kernels_neon.cpp", "tests/ops/compare_sets.cpp"),
]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs Debian's g++-aarch64-linux-gnu")
@pytest.mark.skipif(EMULATOR is None, reason="needs Debian's qemu-user-static")
def test_neon_agrees_with_scalar_code(tmp_path: Path) -> None:
    """Linears of every K and codebook and few to many rows, tables' rows and trellises, the latter two to the bit."""

    def compiled(source: str) -> str:
        target = str(tmp_path / f"{Path(source).stem}.o")
        options = ["-std=c++17", "-O3", "-DNDEBUG", "-ffp-contract=off", "-fno-gcse", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([str(COMPILER), *options, "-c", str(ROOT / source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, SOURCES))
    program = str(tmp_path / "compare_sets")
    subprocess.run([str(COMPILER), *objects, "-static", "-o", program], check=True)
    done = subprocess.run([str(EMULATOR), program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["neon", "0 differences"]
