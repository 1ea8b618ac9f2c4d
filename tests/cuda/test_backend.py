"""Why the native kernels cannot run in a process: what is missing, and what to do."""

import sys

import pytest
import torch

from vllm_exl3.cuda import backend, compiler


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Compute capabilities of the visible GPUs; two that are served, until a test says otherwise."""
    found = {0: (9, 0), 1: (8, 0)}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(backend, "compiler_unavailable", lambda: None)
    return found


def test_supported_gpus_and_a_compiler_are_all_that_it_takes(gpus: dict[int, tuple[int, int]]) -> None:
    assert backend.unavailable() is None


def test_a_torch_without_cuda_is_named_before_gpus(
    gpus: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.clear()
    assert backend.unavailable() == "torch sees no CUDA device"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert backend.unavailable() == "this torch was built without CUDA"


def test_the_old_one_of_several_gpus_is_named(gpus: dict[int, tuple[int, int]]) -> None:
    gpus[1] = (7, 5)
    reason = backend.unavailable() or ""
    assert reason.startswith("cuda:1 GPU 1 has compute capability 7.5") and "CUDA_VISIBLE_DEVICES" in reason


def test_a_compiler_that_is_missing_is_named(gpus: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "compiler_unavailable", lambda: "NVRTC cannot be loaded")
    assert backend.unavailable() == "NVRTC cannot be loaded"


def test_bindings_and_library_of_the_compiler_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_library() -> str:
        raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    monkeypatch.setattr(compiler, "compiler_version", without_library)
    reason = compiler.compiler_unavailable() or ""
    assert reason.startswith("NVRTC cannot be loaded (Failed to dlopen") and "pip install nvidia-cuda-nvrtc" in reason
    monkeypatch.undo()
    compiler.compiler_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    try:
        assert (compiler.compiler_unavailable() or "").startswith("cuda-bindings is not importable")
    finally:
        compiler.compiler_version.cache_clear()
