"""Copies of large tensors from host memory to a GPU, by several threads and through page-locked buffers.

A copy from pageable memory is the work of one thread, in the driver: it takes the page faults of a mapped file and
copies into the driver's own page-locked memory, at a fraction of what the bus carries. Here threads fill buffers side
by side, and the GPU fetches one while others are being filled. Strided sources, as ranks of tensor parallelism take
them, are not made contiguous first.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.platform_utils import is_pin_memory_available

__all__ = ["STAGING", "Buffer", "PageLockedBuffer", "Staging", "pays"]

_LEAST = 8 << 20
"""Bytes of a tensor from which on threads pay."""

_BUFFER = 4 << 20
"""Bytes of a buffer: several to a large tensor, and each takes much longer to fill than to hand over."""

_THREADS = 4


class Buffer(Protocol):
    """Host memory that a thread fills and a device fetches from.

    Attributes:
        memory: its bytes.
    """

    memory: torch.Tensor

    def wait(self) -> None:
        """Return when what was last sent has been fetched."""

    def send(self, target: torch.Tensor) -> None:
        """Have as many bytes as ``target`` is long fetched into it; nothing waits for them."""


class PageLockedBuffer:
    """A `Buffer` for a GPU. It fetches in the order of torch's current stream, like the copies of any loader.

    Args:
        nbytes: its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._fetched = torch.cuda.Event()

    def wait(self) -> None:
        """Return when what was last sent has been fetched."""
        self._fetched.synchronize()

    def send(self, target: torch.Tensor) -> None:
        """Have as many bytes as ``target`` is long fetched into it; nothing waits for them."""
        target.copy_(self.memory[: target.numel()], non_blocking=True)
        self._fetched.record()


def pays(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy is one that threads make faster, and page-locked memory is to be had (not under WSL)."""
    return (
        target.device.type == "cuda"
        and source.device.type == "cpu"
        and source.nbytes >= _LEAST
        and is_pin_memory_available()
        and not source.is_pinned()
    )


class Staging:
    """Copies tensors. Buffers and threads are made when they are first needed, and kept until `release`.

    Args:
        make: makes a buffer of so many bytes.
        nbytes: bytes of a buffer.
        threads: how many fill buffers, of which there are twice as many.
        pays: whether threads are to make a copy.
    """

    def __init__(
        self,
        make: Callable[[int], Buffer] = PageLockedBuffer,
        nbytes: int = _BUFFER,
        threads: int = _THREADS,
        pays: Callable[[torch.Tensor, torch.Tensor], bool] = pays,
    ) -> None:
        self._make, self._nbytes, self._pays = make, nbytes, pays
        self._threads = min(threads, len(os.sched_getaffinity(0)))
        self._free: deque[Buffer] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``target.copy_(source)`` for two tensors of one shape; ``source`` may change as soon as this returns."""
        alike = source.dtype == target.dtype and source.shape == target.shape and source.numel() > 0
        in_rows = source.dim() > 0 and source.stride(-1) == 1 and target.is_contiguous()
        if alike and in_rows and source[0].nbytes <= self._nbytes and self._pays(target, source):
            with self._lock:
                try:
                    self._by_threads(target, source)
                except BaseException:
                    self._forget()  # what was under way holds buffers that the next copy would miss
                    raise
        else:
            target.copy_(source)

    def release(self) -> None:
        """Give buffers and threads back, until the next copy."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        self._free.clear()

    def _by_threads(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Cut the source between rows into what fits a buffer, and send the buffers in their order."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="exl3-copy")
            self._free.extend(self._make(self._nbytes) for _ in range(2 * self._threads))
        left = target.view(-1).view(torch.uint8)
        rows = source.detach().view(torch.uint8).numpy()
        step = self._nbytes // rows[0].nbytes
        filling: deque[tuple[Buffer, torch.Tensor, Future[None]]] = deque()
        for first in range(0, len(rows), step):
            chunk = rows[first : first + step]
            if not self._free:
                self._send(*filling.popleft())
            buffer = self._free.popleft()
            buffer.wait()
            place, left = left[: chunk.nbytes], left[chunk.nbytes :]
            filling.append((buffer, place, self._pool.submit(_fill, buffer, chunk)))
        while filling:
            self._send(*filling.popleft())

    def _send(self, buffer: Buffer, place: torch.Tensor, filled: "Future[None]") -> None:
        filled.result()
        buffer.send(place)
        self._free.append(buffer)


STAGING = Staging()
"""What every layer of this process copies its large tensors with; released when a model is loaded."""


def _fill(buffer: Buffer, chunk: npt.NDArray[np.uint8]) -> None:
    """Copy a chunk to the beginning of a buffer; numpy lets other threads run meanwhile."""
    np.copyto(buffer.memory[: chunk.nbytes].numpy().reshape(chunk.shape), chunk)
