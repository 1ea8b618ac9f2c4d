"""Loading the C++ library, the threads it works on, and its row codec."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.cpu_cases import ISAS, instruction_sets, needs_library
from vllm_exl3.cpu import backend
from vllm_exl3.cpu import library as loading

SOURCES = str(Path(loading.__file__).parents[2])


@pytest.fixture
def reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads again within the test, and as before after it."""
    monkeypatch.setattr(loading, "_load", loading._load.__wrapped__)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
    # vLLM's CPU platform preloads OpenMP into every process that is started after it was imported.
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("checkout", "said"),
    [(True, r"this checkout are not built: in .*, run cmake"), (False, r"installed without .* reinstall it")],
)
def test_absence_is_explained(
    monkeypatch: pytest.MonkeyPatch, reloaded: None, tmp_path: Path, checkout: bool, said: str
) -> None:
    monkeypatch.setattr(loading, "_file", lambda: None)
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "src" / "vllm_exl3" / "cpu" / "library.py"))
    if checkout:
        (tmp_path / "CMakeLists.txt").touch()
    assert re.search(said, loading.unavailable() or "")
    with pytest.raises(RuntimeError, match=said):
        loading.library()


def test_a_broken_file_is_explained(monkeypatch: pytest.MonkeyPatch, reloaded: None, tmp_path: Path) -> None:
    file = tmp_path / "libvllm_exl3_cpu.so"
    file.write_bytes(b"not a library")
    monkeypatch.setattr(loading, "_file", lambda: file)
    assert "does not load" in (loading.unavailable() or "")


@needs_library
def test_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch, reloaded: None) -> None:
    monkeypatch.setattr(loading, "ABI_VERSION", loading.ABI_VERSION + 1)
    assert f"expected {loading.ABI_VERSION}" in (loading.unavailable() or "")


@needs_library
def test_structures_match_the_header() -> None:
    assert ctypes.sizeof(loading.ShardStruct) == 48
    assert ctypes.sizeof(loading.LinearCall) == 7 * 8 + 4 * 8 + 4 * 4


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_forces_an_instruction_set(isa: str) -> None:
    code = "from vllm_exl3.cpu.library import library; print(library().exl3_isa().decode())"
    assert run_python(code, VLLM_EXL3_CPU_ISA=isa).stdout.strip() == isa


@needs_library
def test_an_unknown_instruction_set_names_the_variable() -> None:
    result = run_python("from vllm_exl3.cpu.library import library; library()", VLLM_EXL3_CPU_ISA="altivec")
    assert result.returncode
    assert "VLLM_EXL3_CPU_ISA='altivec'" in result.stderr


@needs_library
def test_an_instruction_set_of_another_processor_is_refused() -> None:
    other = "avx2" if "neon" in instruction_sets() else "neon"
    result = run_python("from vllm_exl3.cpu.library import library; library()", VLLM_EXL3_CPU_ISA=other)
    assert result.returncode
    assert f"VLLM_EXL3_CPU_ISA={other}: this CPU does not run it" in result.stderr


@needs_library
def test_importing_loads_no_torch() -> None:
    code = """
import sys
from vllm_exl3.cpu import library, quantize
library.library()
print("torch" in sys.modules)
"""
    assert run_python(code).stdout.strip() == "False"


# One linear, on as many threads as torch has, in a process bound to given CPUs before torch is loaded
# (as vLLM's workers are); prints the threads of the process before and after, and those that ran.
THREADS = """
import os, sys
os.sched_setaffinity(0, {cpus})
import numpy as np, torch
torch.set_num_threads(2)
from vllm_exl3.cpu import backend, library
from vllm_exl3.ops.shards import Shard, pack_shards
shard = Shard(8, 2, 1024, 4096, 0, 4096)
layout = tuple(pack_shards([shard]))
tensors = (torch.zeros(shard.trellis_words, dtype=torch.int16), torch.ones(1024).half(), torch.ones(4096).half())
torch.randn(2048, 2048) @ torch.randn(2048, 2048)
count = lambda: len(os.listdir("/proc/self/task"))
def ticks():
    used = {{}}
    for task in os.listdir("/proc/self/task"):
        fields = open(f"/proc/self/task/{{task}}/stat").read().rpartition(") ")[2].split()
        used[task] = int(fields[11]) + int(fields[12])
    return used
before, first = count(), ticks()
for _ in range(200):
    backend.linear(torch.ones(8, 1024), *tensors, None, layout)
last = ticks()
busy = sum(last[task] - first.get(task, 0) > 5 for task in last)
print(before, count(), busy, library.find_openmp() is not None)
"""


@needs_library
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_the_openmp_threads_of_torch_do_the_work() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    result = run_python(THREADS.format(cpus=set(cpus)))
    assert result.returncode == 0, result.stderr
    before, after, busy, found = result.stdout.split()
    assert found == "True"
    assert before == after
    assert int(busy) == 2


@needs_library
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_one_cpu_for_two_threads_still_finishes() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:1]
    result = run_python(THREADS.format(cpus=set(cpus)), OMP_NUM_THREADS="2")
    assert result.returncode == 0, result.stderr


@needs_library
def test_own_threads_without_a_runtime() -> None:
    code = """
import numpy as np
from vllm_exl3.cpu.quantize import encode
from vllm_exl3.cpu.library import find_openmp
from vllm_exl3.pack.stored import Codebook
weights = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
assert find_openmp() is None
one, four = (encode(weights, 8, Codebook.MUL1, threads=threads) for threads in (1, 4))
assert (one == four).all()
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_no_more_threads_than_a_cgroup_gives_time_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.torch, "get_num_threads", lambda: 8)
    for quota, threads in ((3, 3), (1 << 16, 8)):
        monkeypatch.setattr(backend, "quota_threads", lambda quota=quota: quota)
        assert backend.threads() == threads
