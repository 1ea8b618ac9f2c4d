"""One device's kernels: compiled or taken from the cache, loaded once, handed out by instance."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vllm_exl3 import env
from vllm_exl3.cuda.cache import CubinCache, default_folder
from vllm_exl3.cuda.compiler import Instance, compile_instance, fingerprint
from vllm_exl3.cuda.driver import Kernel, find_launcher, load_kernel, zeroed_memory
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.wide import TRANSFORM
from vllm_exl3.processors import allowed

__all__ = ["Device", "architecture_of", "build", "cache_folder", "current_stream", "device", "own_instances"]

logger = logging.getLogger("vllm.exl3")

_SAID_EVERY = 10.0
"""Seconds between lines on how far compiling is."""

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


class _Progress:
    """Says that something is compiled, every few seconds how far that is, and what it took; of the cache's, nothing.

    Args:
        total: kernels that are asked for.
        architecture: such as ``sm_90a``.
        folder: where they are kept.
        say: takes the lines.
    """

    def __init__(self, total: int, architecture: str, folder: Path, say: Callable[[str], object]) -> None:
        self._total, self._architecture, self._folder, self._say = total, architecture, folder, say
        self._lock = threading.Lock()
        self._started = self._said = time.perf_counter()
        self._begun, self._ready = False, 0

    def begins(self) -> None:
        """A kernel is about to be compiled."""
        with self._lock:
            if not self._begun:
                self._begun, self._said = True, time.perf_counter()
                self._say(f"EXL3: compiling kernels for {self._architecture}, to be kept in {self._folder}")

    def ready(self) -> None:
        """A kernel was compiled or found."""
        with self._lock:
            self._ready += 1
            if self._begun and self._ready < self._total and time.perf_counter() - self._said >= _SAID_EVERY:
                self._said = time.perf_counter()
                left = (self._said - self._started) / self._ready * (self._total - self._ready)
                self._say(
                    f"EXL3: {self._ready} of {self._total} kernels for {self._architecture} are ready, "
                    f"about {left:.0f} s left"
                )

    def ends(self, compiled: int) -> None:
        """All kernels are there."""
        if compiled:
            seconds = time.perf_counter() - self._started
            self._say(f"EXL3: compiled {compiled} of {self._total} kernels for {self._architecture} in {seconds:.1f} s")


def build(
    instances: Iterable[Instance],
    architecture: str,
    cache: CubinCache,
    *,
    say: Callable[[str], object] = logger.info,
) -> dict[Instance, bytes]:
    """Cubins of all instances, compiled in parallel where the cache lacks them.

    Args:
        instances: what to build; duplicates are built once.
        architecture: such as ``sm_90a``.
        cache: where cubins are looked up and stored.
        say: takes lines on what is compiled, how far that is and how long it took.

    Raises:
        CompileError: a kernel does not compile.
    """
    wanted = list(dict.fromkeys(instances))
    progress = _Progress(len(wanted), architecture, cache.folder, say)

    def compiled_now(instance: Instance) -> bytes:
        progress.begins()
        return compile_instance(instance, architecture).image

    def one(instance: Instance) -> tuple[bytes, bool]:
        found = cache.get(fingerprint(instance, architecture), instance.label, lambda: compiled_now(instance))
        progress.ready()
        return found

    workers = max(1, min(len(wanted), allowed()))
    with ThreadPoolExecutor(workers, thread_name_prefix="exl3-nvrtc") as pool:
        results = list(pool.map(one, wanted))
    progress.ends(sum(not cached for _, cached in results))
    return {instance: image for instance, (image, _) in zip(wanted, results, strict=True)}


def own_instances(limits: GpuLimits) -> list[Instance]:
    """The kernels that a `Device` itself needs: one whose clusters are counted, where there are any."""
    return [TRANSFORM] if limits.dependent_launch else []


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
        self.launcher = find_launcher()
        self._cache = CubinCache(cache_folder())
        self._kernels: dict[Instance, Kernel] = {}
        self._lock = threading.Lock()
        self._counters = 0
        self._counters_used = 0
        self._stream_counters: dict[int, tuple[int, int]] = {}
        for instance in own_instances(self.limits):
            self._measure_clusters(self.kernel(instance))

    def _measure_clusters(self, kernel: Kernel) -> None:
        """Ask the driver how many clusters of a kernel fit: their blocks must lie in one group of multiprocessors."""
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
        """The loaded kernel. What nothing prepared is compiled now, as those of tables are, by a look-up at loading.

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


_devices: dict[int, Device] = {}
_making = threading.Lock()


def device(index: int) -> Device:
    """The `Device` of a CUDA device index, made once, whichever threads ask for it."""
    found = _devices.get(index)
    if found is None:
        with _making:
            found = _devices.get(index) or _devices.setdefault(index, Device(index))
    return found


def current_stream(index: int) -> int:
    """The handle of torch's current stream of a CUDA device.

    Asked for as Triton does: ``torch.cuda.current_stream`` makes an object, which takes longer than a launch.
    """
    return int(torch._C._cuda_getCurrentRawStream(index))
