"""The state of a machine, with NVML and folders of the tests' own."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_exl3.serving import machine

GIB = 1 << 30


class Nvml:
    """NVML with some processes on its one device."""

    NVMLError = OSError

    def __init__(self, *processes: tuple[int, int | None], fails: bool = False) -> None:
        self.processes, self.fails, self.asked = processes, fails, ""

    def nvmlInit(self) -> None:
        if self.fails:
            raise OSError("no driver")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> None:
        self.asked = str(index)

    def nvmlDeviceGetHandleByUUID(self, name: str) -> None:
        self.asked = name

    def nvmlDeviceGetMemoryInfo(self, _: None) -> Any:
        return SimpleNamespace(used=3 * GIB, total=24 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _: None) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes]


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (Nvml(), "3 GiB of 24 GiB in use, by no other process that NVML sees"),
        (Nvml((os.getpid(), GIB)), "3 GiB of 24 GiB in use, by no other process that NVML sees"),
        (Nvml((999999999, GIB)), "3 GiB of 24 GiB in use, by 1 other process: process 999999999 (1 GiB)"),
        (Nvml((999999999, None)), "3 GiB of 24 GiB in use, by 1 other process: process 999999999"),
        (Nvml(fails=True), "NVML does not say who uses it (no driver)"),
    ],
)
def test_who_holds_memory_of_a_gpu(nvml: Nvml, said: str) -> None:
    assert machine.check_gpu_memory(0, nvml) == said


def test_many_processes_are_counted() -> None:
    said = machine.check_gpu_memory(0, Nvml(*((999999900 + number, GIB) for number in range(6))))
    assert "by 6 other processes" in said and said.endswith(" and 2 more")


@pytest.mark.parametrize(("visible", "asked"), [("", "1"), ("3,5", "5"), ("GPU-aa,GPU-bb", "GPU-bb")])
def test_the_device_is_that_of_cuda_s_numbering(visible: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml()
    machine.check_gpu_memory(1, nvml)
    assert nvml.asked == asked


def test_graphs_from_before_this_installation_are_named(tmp_path: Path) -> None:
    package, caches = tmp_path / "package", tmp_path / "caches"
    assert machine.check_compile_caches(_installed(package, 1000), caches).startswith("0 compiled graphs")
    for name, when in (("old", 500), ("new", 1500)):
        (caches / name).mkdir(parents=True)
        (caches / name / "graph").write_bytes(bytes(2048))
        os.utime(caches / name, (when, when))
    said = machine.check_compile_caches(package, caches)
    assert said.startswith("1 of 2 compiled graphs from before this installation (2 KiB in")


def _installed(package: Path, when: float) -> Path:
    package.mkdir()
    (package / "__init__.py").touch()
    os.utime(package / "__init__.py", (when, when))
    return package
