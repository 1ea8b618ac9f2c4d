"""Memory of a server: of its processes on the host, of the GPUs it uses, and what its log says of weights and cache."""

import contextlib
import importlib
import re
import subprocess
from collections.abc import Iterable
from typing import Any

import psutil

__all__ = ["Peak", "from_log", "gpu_bytes"]

_MODEL = re.compile(r"Model loading took ([\d.]+) GiB memory and ([\d.]+) seconds")
_WEIGHTS = re.compile(r"Loading weights took ([\d.]+) seconds")
_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")


class Peak:
    """The largest memory of a tree of processes and of the GPUs, sampled.

    Attributes:
        host: bytes, shared pages divided among those that share them (PSS); mapped files count while they are mapped.
        gpu: bytes on all GPUs beyond what was used before, or None without a way to ask.
        read: bytes that the processes read from disk.
    """

    def __init__(self) -> None:
        self._before = gpu_bytes()
        self.host, self.read = 0, 0
        self.gpu: int | None = None if self._before is None else 0

    def sample(self, processes: Iterable[psutil.Process]) -> None:
        """Take the memory of these processes, and the GPUs'."""
        host = read = 0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                host += process.memory_full_info().pss
                read += process.io_counters().read_bytes
        self.host, self.read = max(self.host, host), max(self.read, read)
        if self._before is not None and (used := gpu_bytes()) is not None:
            self.gpu = max(self.gpu or 0, used - self._before)


def gpu_bytes() -> int | None:
    """Bytes in use on all GPUs of this machine, by NVML or its program, else by torch; None without a GPU."""
    for ask in (_by_nvml, _by_program, _by_torch):
        if (used := ask()) is not None:
            return used
    return None


def _by_nvml() -> int | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no such package, no driver, or one too old: each says so in its own way
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return sum(int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    finally:
        nvml.nvmlShutdown()


def _by_program() -> int | None:
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return sum(int(line) << 20 for line in lines)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def _by_torch() -> int | None:
    """Starts CUDA in this process, whose own memory is then in use from the first answer on."""
    import torch

    if not torch.cuda.is_available():
        return None
    pairs = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    return sum(total - free for free, total in pairs)


def from_log(log: str) -> dict[str, Any]:
    """What vLLM itself logs, where it does: weights in bytes (of the largest rank), seconds, tokens of the KV cache."""
    facts: dict[str, Any] = {}
    if found := _MODEL.findall(log):
        facts["weight_bytes"] = int(max(float(gib) for gib, _ in found) * 2**30)
        facts["model_s"] = max(float(seconds) for _, seconds in found)
    if seconds := _WEIGHTS.findall(log):
        facts["weights_s"] = max(map(float, seconds))
    if tokens := _CACHE.findall(log):
        facts["tokens_in_cache"] = min(int(text.replace(",", "")) for text in tokens)
    return facts
