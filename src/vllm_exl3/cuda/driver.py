"""Loading cubins and launching kernels with the CUDA driver, through cuda-bindings."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_exl3.cpu import library

__all__ = [
    "DriverError",
    "Kernel",
    "driver_functions",
    "end_side_stream",
    "find_launcher",
    "load_kernel",
    "mapped_address",
    "side_stream",
    "wait_event",
    "zeroed_memory",
]


class DriverError(RuntimeError):
    """A CUDA driver call that failed."""


def _check(status: Any, what: str) -> None:
    if status != 0:
        raise DriverError(f"{what}: {status}")


@dataclass(slots=True)
class Kernel:
    """One loaded kernel of one device.

    Attributes:
        function: the driver's handle.
        module: keeps the code loaded.
        context: the CUDA context that it is loaded into.
        label: what messages call it.
        shared_limit: dynamic shared memory in bytes that launches may use so far.
        context_address: what tells that context from others.
    """

    function: Any
    module: Any
    context: Any
    label: str
    shared_limit: int = 48 * 1024
    context_address: int = field(init=False)

    def __post_init__(self) -> None:
        self.context_address = int(self.context)

    def allow_shared(self, size: int) -> None:
        """Raise the dynamic shared memory that a launch may use to ``size`` bytes."""
        if size <= self.shared_limit:
            return
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(self.function, attribute, size)
        _check(status, f"{self.label}: {size} bytes of shared memory")
        self.shared_limit = size

    def active_clusters(self, blocks: int, threads: int, shared: int) -> int:
        """Clusters of ``blocks`` blocks that run at once on the device; 0 where it cannot tell."""
        driver = _driver()
        self.allow_shared(shared)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 64 * blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        _set_attributes(config, _cluster_attributes(blocks))
        status, count = driver.cuOccupancyMaxActiveClusters(self.function, config)
        return int(count) if int(status) == 0 else 0

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        stream: int,
        arguments: list[Any],
        dependent: bool,
        cluster: int = 1,
    ) -> None:
        """Launch on a stream without waiting.

        Args:
            grid: blocks in x and y.
            threads: threads a block.
            shared: dynamic shared memory in bytes.
            stream: the CUDA stream's handle.
            arguments: ctypes values or structures in the kernel's order; copied by the launch.
            dependent: let it start before the kernel ahead in the stream has finished; the kernel itself waits
                (``griddepcontrol.wait``) before it touches anything that others write. Needs sm_90.
            cluster: blocks in x that form a cluster. Needs sm_90.
        """
        driver = _driver()
        config = _launch_config(grid, threads, shared, stream, dependent, cluster)
        pointers = _pointers(len(arguments))(*map(ctypes.addressof, arguments))
        # A default stream's handle means that of the current context, which may be another device's.
        status, current = driver.cuCtxGetCurrent()
        _check(status, "asking for the current context")
        switch = int(current) != self.context_address
        if switch:
            (status,) = driver.cuCtxPushCurrent(self.context)
            _check(status, "making a kernel's context the current one")
        (status,) = driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0)
        if switch:
            driver.cuCtxPopCurrent()
        _check(status, self.label)


@functools.cache
def _driver() -> Any:
    """cuda-bindings' module, imported where it is first needed: without a GPU it need not be there."""
    from cuda.bindings import driver

    return driver


@functools.cache
def _pointers(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * count


@functools.lru_cache(maxsize=4096)
def _launch_config(grid: tuple[int, int], threads: int, shared: int, stream: int, dependent: bool, cluster: int) -> Any:
    """The driver's description of a launch: kept and only read, for filling one in takes longer than launching."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = driver.CUstream(stream)
    _set_attributes(config, ([_dependent_attribute()] if dependent else []) + _cluster_attributes(cluster))
    return config


def _set_attributes(config: Any, attributes: list[Any]) -> None:
    config.attrs = attributes
    config.numAttrs = len(attributes)


def _dependent_attribute() -> Any:
    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _cluster_attributes(blocks: int) -> list[Any]:
    if blocks == 1:
        return []
    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = blocks, 1, 1
    attribute.value = value
    return [attribute]


def load_kernel(image: bytes, entry: str, label: str) -> Kernel:
    """Load a cubin into the current context and find its kernel.

    Raises:
        DriverError: the image does not fit the device, or has no such kernel.
    """
    driver = _driver()
    status, module = driver.cuModuleLoadData(image)
    _check(status, f"loading {label}")
    status, function = driver.cuModuleGetFunction(module, entry.encode())
    _check(status, f"{label}: kernel {entry}")
    status, context = driver.cuCtxGetCurrent()
    _check(status, f"{label}: the current context")
    return Kernel(function, module, context, label)


def zeroed_memory(size: int) -> int:
    """Address of new zeroed device memory in the current context; it is never freed.

    It does not come from torch's allocator: a pool that a framework discards or restores must not touch it.
    """
    driver = _driver()
    status, address = driver.cuMemAlloc(size)
    _check(status, f"allocating {size} bytes")
    (status,) = driver.cuMemsetD32(address, 0, size // 4)
    _check(status, "clearing memory")
    (status,) = driver.cuCtxSynchronize()
    _check(status, "clearing memory")
    return int(address)


def mapped_address(host: int) -> int:
    """The address at which the current context's kernels read mapped host memory.

    Raises:
        DriverError: it is not mapped.
    """
    driver = _driver()
    status, address = driver.cuMemHostGetDevicePointer(host, 0)
    _check(status, f"mapping host memory at {host:#x}")
    return int(address)


_LAUNCHER_FUNCTIONS = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
"""What ``exl3_set_driver`` of the C++ library takes, under the names that the driver exports."""


def driver_functions(names: Sequence[str]) -> list[ctypes.c_void_p] | None:
    """Addresses of functions of the driver; None where it is too old (before CUDA 11.8) or there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return [ctypes.cast(getattr(driver, name), ctypes.c_void_p) for name in names]
    except (OSError, AttributeError):
        return None


def side_stream() -> tuple[int, int, int, int]:
    """Handles of the current context, a new stream in it that waits for no other, and two events without times."""
    driver = _driver()
    status, context = driver.cuCtxGetCurrent()
    _check(status, "asking for the current context")
    status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    _check(status, "making a stream")
    events = []
    for _ in range(2):
        status, event = driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        _check(status, "making an event")
        events.append(int(event))
    return int(context), int(stream), *events


def end_side_stream(stream: int, *events: int) -> None:
    """Give back what `side_stream` made; work that the stream holds still runs to its end."""
    driver = _driver()
    driver.cuStreamDestroy(driver.CUstream(stream))
    for event in events:
        driver.cuEventDestroy(driver.CUevent(event))


def wait_event(stream: int, event: int) -> None:
    """Let a stream wait for what an event was last recorded behind."""
    driver = _driver()
    (status,) = driver.cuStreamWaitEvent(driver.CUstream(stream), driver.CUevent(event), 0)
    _check(status, "waiting for an event")


@functools.lru_cache(maxsize=1)
def find_launcher() -> ctypes.CDLL | None:
    """The C++ library, knowing the driver's functions; None where it was not built, or the driver is too old."""
    if library.unavailable() is not None:
        return None
    functions = driver_functions(_LAUNCHER_FUNCTIONS)
    if functions is None:
        return None
    loaded = library.library()
    loaded.exl3_set_driver(*functions)
    return loaded
