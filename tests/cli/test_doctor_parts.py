"""Parts of `vllm-exl3 doctor` that need neither a GPU nor vLLM."""

import getpass
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_exl3.cli import app, doctor_gpu
from vllm_exl3.cli.doctor import doctor
from vllm_exl3.cli.doctor_checkout import check_checkout, checkout
from vllm_exl3.cli.redaction import redacted

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{Path.home()}/models/x.safetensors", "~/models/x.safetensors"),
        ("/data/alice/packs/llama: 3 kernels", "<folder>/llama: 3 kernels"),
        ("VLLM_EXL3_CACHE=/mnt/disk/cache", "VLLM_EXL3_CACHE=<folder>/cache"),
        ("/usr/bin/cc, /usr/include/python3.11/Python.h", "/usr/bin/cc, /usr/include/python3.11/Python.h"),
        ("HF_TOKEN=hf_AbCdEfGhIjKlMn", "HF_TOKEN=<token>"),
        ("http://alice:secret@mirror/x", "http://<token>@mirror/x"),
        ("3 of 4 kinds, 9 rows/s", "3 of 4 kinds, 9 rows/s"),
    ],
)
def test_what_could_identify_someone_is_taken_out(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_names_of_user_and_machine_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-box")
    assert redacted("alice on alices-box, malice") == "<name> on <name>, malice"


def test_json_says_the_same_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("cannot be written: /data/alice/cache")

    checks = (("one", lambda: "in /data/alice/cache"), ("other", broken))
    monkeypatch.setitem(doctor.__globals__, "_checks", lambda: iter(checks))
    monkeypatch.setitem(doctor.__globals__, "_variables", lambda: "none")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 1 and found["ok"] is False
    assert [(row["check"], row["ok"], row["note"]) for row in found["checks"]] == [
        ("one", True, "in <folder>/cache"),
        ("other", False, "cannot be written: <folder>/cache"),
        ("environment variables", True, "none"),
    ]


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
    assert doctor_gpu.check_gpu_memory(0, nvml) == said


def test_many_processes_are_counted() -> None:
    said = doctor_gpu.check_gpu_memory(0, Nvml(*((999999900 + number, GIB) for number in range(6))))
    assert "by 6 other processes" in said and said.endswith(" and 2 more")


@pytest.mark.parametrize(("visible", "asked"), [("", "1"), ("3,5", "5"), ("GPU-aa,GPU-bb", "GPU-bb")])
def test_the_device_is_that_of_cuda_s_numbering(visible: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml()
    doctor_gpu.check_gpu_memory(1, nvml)
    assert nvml.asked == asked


def test_graphs_from_before_this_installation_are_named(tmp_path: Path) -> None:
    package, caches = tmp_path / "package", tmp_path / "caches"
    assert doctor_gpu.check_compile_caches(_installed(package, 1000), caches).startswith("0 compiled graphs")
    for name, when in (("old", 500), ("new", 1500)):
        (caches / name).mkdir(parents=True)
        (caches / name / "graph").write_bytes(bytes(2048))
        os.utime(caches / name, (when, when))
    said = doctor_gpu.check_compile_caches(package, caches)
    assert said.startswith("1 of 2 compiled graphs from before this installation (2 KiB in")


def _installed(package: Path, when: float) -> Path:
    package.mkdir()
    (package / "__init__.py").touch()
    os.utime(package / "__init__.py", (when, when))
    return package


def test_a_checkout_that_lacks_something_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "vllm_exl3"
    (source / "cpu").mkdir(parents=True)
    (source / "a.py").write_text("1")
    monkeypatch.chdir(tmp_path)
    assert checkout(source) is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "vllm-exl3"\n')
    assert checkout(source) == checkout(Path("/usr/lib/python3")) == tmp_path
    with pytest.raises(RuntimeError, match=r"no \.venv: `make setup`.*; the CPU library is not built: `make setup`"):
        check_checkout(tmp_path, source)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    (source / "cpu" / "libvllm_exl3_cpu.so").touch()
    assert "installed as it is" in check_checkout(tmp_path, source)
    installed = tmp_path / "site-packages" / "vllm_exl3"
    (installed / "cpu").mkdir(parents=True)
    (installed / "cpu" / "libvllm_exl3_cpu.so").touch()
    with pytest.raises(RuntimeError, match=r"src/vllm_exl3/a\.py differs from the installed one: `make setup`"):
        check_checkout(tmp_path, installed)
