"""Threads of the C++ library's own, with their working memory, for callers that have no OpenMP runtime to lend.

CUDA runs host functions on a thread of its own, and an OpenMP runtime would start a second team of threads there. A
context has as many threads as it is created with, on the processors that it is given, and can make its memory large
enough beforehand.
"""

import ctypes
from collections.abc import Sequence
from types import TracebackType

from vllm_exl3.cpu.library import check, library

__all__ = ["Context"]


class Context:
    """What ``exl3_moe`` runs on. One call at a time; another one waits. Not for a fork of the process.

    Args:
        threads: that work at the same time, with the one that calls.
        cpus: the processor of each of the other ``threads - 1``; None leaves them where the system puts them.
        spin_us: microseconds for which a thread that waits spins before it sleeps.

    Raises:
        ValueError: there are not ``threads - 1`` processors.
        RuntimeError: the system does not start these threads, or has no such processor.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None = None, spin_us: int = 50) -> None:
        self.threads = threads
        self.address: int | None = None
        if cpus is not None and len(cpus) != threads - 1:
            raise ValueError(
                f"cpus: found {len(cpus)} processors, expected {threads - 1}: the calling thread has its own"
            )
        numbers = None if cpus is None else (ctypes.c_int32 * len(cpus))(*cpus)
        made = ctypes.c_void_p()
        check(library().exl3_context_create(threads, numbers, spin_us, ctypes.byref(made)))
        self.address = made.value

    @property
    def scratch_bytes(self) -> int:
        """Bytes of working memory that it holds."""
        found: int = library().exl3_context_bytes(self.address)
        return found

    def close(self) -> None:
        """Stop the threads and free the memory. No call may be running."""
        address, self.address = self.address, None
        if address is not None:
            library().exl3_context_destroy(address)

    def __enter__(self) -> "Context":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
