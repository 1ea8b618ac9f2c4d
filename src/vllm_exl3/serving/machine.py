"""The state of a machine as vLLM sees it, for `vllm-exl3 doctor`: users of GPU memory, and old compiled graphs."""

import os
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.third_party import pynvml

from vllm_exl3.pack.wording import counted, format_bytes

__all__ = ["check_compile_caches", "check_gpu_memory"]

_MOST_NAMED = 4
"""Processes that a line names."""


def check_gpu_memory(index: int, nvml: Any = pynvml) -> str:
    """Who holds memory of a GPU: a process that an earlier server left there is why the next one does not start.

    Args:
        index: the CUDA device, as this process numbers them.
        nvml: NVML's Python binding; by default the one that vLLM brings.
    """
    try:
        nvml.nvmlInit()
        handle = _handle(nvml, index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as error:
        return f"NVML does not say who uses it ({error})"
    used = f"{format_bytes(memory.used)} of {format_bytes(memory.total)} in use"
    others = [process for process in processes if process.pid != os.getpid()]
    if not others:
        return f"{used}, by no other process that NVML sees"
    named = [f"{_program(process.pid)} {process.pid}{_size(process.usedGpuMemory)}" for process in others[:_MOST_NAMED]]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    processes_counted = "1 other process" if len(others) == 1 else f"{len(others)} other processes"
    return f"{used}, by {processes_counted}: {', '.join(named)}{more}"


def _handle(nvml: Any, index: int) -> Any:
    """The device of an index that CUDA_VISIBLE_DEVICES may have changed."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    wanted = visible[index] if index < len(visible) else str(index)
    return nvml.nvmlDeviceGetHandleByIndex(int(wanted)) if wanted.isdigit() else nvml.nvmlDeviceGetHandleByUUID(wanted)


def _program(pid: int) -> str:
    """A process's name without its path; of another container it is not known."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() or "process"
    except OSError:
        return "process"


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else f" ({format_bytes(nbytes)})"


def check_compile_caches(package: Path | None = None, caches: Path | None = None) -> str:
    """How much of vLLM's cache of compiled graphs is older than this installation of the package.

    vLLM does not use them, since the package's version is part of their keys; they only take space.

    Args:
        package: the package's folder.
        caches: vLLM's folder of compiled graphs.
    """
    package = package or Path(__file__).parents[1]
    caches = caches or Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache"
    installed = package.joinpath("__init__.py").stat().st_mtime
    entries = [entry for entry in caches.iterdir() if entry.is_dir()] if caches.is_dir() else []
    stale = [entry for entry in entries if entry.stat().st_mtime < installed]
    if not stale:
        return f"{counted(len(entries), 'compiled graph')}, none from before this installation"
    size = sum(file.stat().st_size for entry in stale for file in entry.rglob("*") if file.is_file())
    return (
        f"{len(stale)} of {counted(len(entries), 'compiled graph')} from before this installation "
        f"({format_bytes(size)} in {caches}): they may be deleted"
    )
