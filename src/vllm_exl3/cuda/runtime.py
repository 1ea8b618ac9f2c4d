"""One device's kernels: compiled or taken from the cache, loaded once, handed out by instance."""

import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vllm_exl3 import env
from vllm_exl3.cuda.cache import CubinCache, default_folder
from vllm_exl3.cuda.compiler import Instance, compile_instance, fingerprint
from vllm_exl3.cuda.driver import Kernel, load_kernel, zeroed_memory
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.wide import TRANSFORM

__all__ = ["Device", "architecture_of", "build", "cache_folder", "current_stream", "device"]

logger = logging.getLogger("vllm.exl3")

_COUNTERS = 1 << 20
"""Arrival counters of a device (4 MiB): shares of eager streams, then those of captured launches."""


def cache_folder() -> Path:
    """Where cubins are kept."""
    chosen = env.CACHE.get()
    return Path(chosen).expanduser() / "cubins" if chosen else default_folder()


def architecture_of(capability: tuple[int, int]) -> str:
    """NVRTC's exact architecture for a compute capability; sm_90 and later with their own instructions."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def build(
    instances: Iterable[Instance], architecture: str, cache: CubinCache, *, progress: bool = True
) -> dict[Instance, bytes]:
    """Cubins of all instances, compiled in parallel where the cache lacks them.

    Args:
        instances: what to build; duplicates are built once.
        architecture: such as ``sm_90a``.
        cache: where cubins are looked up and stored.
        progress: log that something is compiled, then how much and how long it took.
    """
    wanted = list(dict.fromkeys(instances))
    started = time.perf_counter()
    first = threading.Lock()  # taken by the first compilation, for good

    def compiled_now(instance: Instance) -> bytes:
        if progress and first.acquire(blocking=False):
            logger.info("EXL3: compiling kernels for %s, to be kept in %s", architecture, cache.folder)
        return compile_instance(instance, architecture).image

    def one(instance: Instance) -> tuple[bytes, bool]:
        return cache.get(fingerprint(instance, architecture), instance.label, lambda: compiled_now(instance))

    workers = max(1, min(len(wanted), len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(workers, thread_name_prefix="exl3-nvrtc") as pool:
        results = list(pool.map(one, wanted))
    compiled = sum(not cached for _, cached in results)
    if progress and compiled:
        seconds = time.perf_counter() - started
        logger.info("EXL3: compiled %d of %d kernels for %s in %.1f s", compiled, len(wanted), architecture, seconds)
    return {instance: image for instance, (image, _) in zip(wanted, results, strict=True)}


class Device:
    """The kernels of one CUDA device in this process.

    Args:
        index: the CUDA device.
    """

    def __init__(self, index: int) -> None:
        properties = torch.cuda.get_device_properties(index)
        self.index = index
        self.name = properties.name
        self.capability = (properties.major, properties.minor)
        self.limits = GpuLimits(
            architecture=architecture_of(self.capability),
            multiprocessors=properties.multi_processor_count,
            shared_memory=properties.shared_memory_per_block_optin,
        )
        self._cache = CubinCache(cache_folder())
        self._kernels: dict[Instance, Kernel] = {}
        self._lock = threading.Lock()
        self._counters = 0
        self._counters_used = 0
        self._stream_counters: dict[int, tuple[int, int]] = {}
        if self.limits.dependent_launch:
            self._measure_clusters()

    def _measure_clusters(self) -> None:
        """Ask the driver how many clusters fit: their blocks must lie in one group of multiprocessors."""
        kernel = self.kernel(TRANSFORM)
        shared = self.limits.shared_memory - 4096  # so much that a multiprocessor holds one block
        with torch.cuda.device(self.index):
            clusters = tuple((blocks, kernel.active_clusters(blocks, 512, shared)) for blocks in (2, 4, 8))
        self.limits = dataclasses.replace(self.limits, clusters=clusters)

    def prepare(self, instances: Iterable[Instance]) -> None:
        """Compile and load what a model needs, so that no request ever waits for a compiler."""
        with self._lock:
            missing = [instance for instance in dict.fromkeys(instances) if instance not in self._kernels]
            if not missing:
                return
            images = build(missing, self.limits.architecture, self._cache)
            with torch.cuda.device(self.index):
                torch.cuda.current_stream()  # makes torch's context the current one
                self._counters = self._counters or zeroed_memory(4 * _COUNTERS)
                for instance, image in images.items():
                    self._kernels[instance] = load_kernel(image, instance.entry, instance.label)

    def kernel(self, instance: Instance) -> Kernel:
        """The loaded kernel. What nothing prepared is compiled now, as are those of tables, in vLLM's profiling run.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        kernel = self._kernels.get(instance)
        if kernel is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{instance.label} was not prepared before a CUDA graph capture, during which nothing can be "
                    "compiled: please report the layer's shape, and serve with --enforce-eager until then"
                )
            self.prepare([instance])
            kernel = self._kernels[instance]
        return kernel

    def counters(self, stream: int, count: int) -> int:
        """Address of ``count`` zeroed counters for one launch; a launch leaves them zero.

        Launches of one stream run one after the other and share theirs. A captured launch gets its own for good, since
        its graph may be replayed on any stream.
        """
        captured = torch.cuda.is_current_stream_capturing()
        with self._lock:
            address, size = (0, 0) if captured else self._stream_counters.get(stream, (0, 0))
            if count > size:
                if self._counters_used + count > _COUNTERS:
                    raise RuntimeError(
                        f"{self.name}: more than {_COUNTERS} arrival counters are in use, since every captured CUDA "
                        "graph keeps its own: capture fewer batch sizes (--cudagraph-capture-sizes), or restart"
                    )
                address, size = self._counters + 4 * self._counters_used, count
                self._counters_used += count
                if not captured:
                    self._stream_counters[stream] = address, size
            return address


@functools.cache
def device(index: int) -> Device:
    """The `Device` of a CUDA device index, made once."""
    return Device(index)


def current_stream(index: int) -> int:
    """The handle of torch's current stream of a CUDA device.

    Asked for as Triton does: ``torch.cuda.current_stream`` makes an object, which takes longer than a launch.
    """
    return int(torch._C._cuda_getCurrentRawStream(index))
