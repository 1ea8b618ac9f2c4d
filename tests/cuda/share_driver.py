"""The driver's functions that the CPU's share of experts calls, played by functions of this process.

Streams are lists of work: what is enqueued waits there until `FakeDriver.run`, as on a GPU, so that code that reads a
result too early finds none. A wait for an event runs what the event was recorded behind.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_exl3.cpu import library
from vllm_exl3.cuda import driver as real
from vllm_exl3.cuda import runtime, share

__all__ = ["CONTEXT", "DONE", "MAIN", "READY", "SIDE", "FakeDriver", "playing"]

CONTEXT, MAIN, SIDE, READY, DONE = 0x1000, 7, 8, 0x21, 0x22


@dataclass
class FakeDriver:
    """Attributes: the calls by name, what streams hold, and the status that the function ``failing`` returns."""

    context: int = CONTEXT
    calls: list[str] = field(default_factory=list)
    work: list[Callable[[], Any]] = field(default_factory=list)
    failing: str = ""
    immediate: bool = True

    def run(self) -> None:
        """Do what is enqueued."""
        work, self.work = self.work, []
        for item in work:
            item()

    def _enqueue(self, item: Callable[[], Any]) -> None:
        self.work.append(item)
        if self.immediate:
            self.run()

    def _status(self, name: str, detail: object) -> int:
        self.calls.append(f"{name} {detail}")
        return 700 if name == self.failing else 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        status = self._status("copy", stream)
        self._enqueue(lambda: ctypes.memmove(target, source, nbytes))
        return status

    def host_function(self, stream: int, function: Any, data: int) -> int:
        status = self._status("host", stream)
        self._enqueue(lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data))
        return status

    def record(self, event: int, stream: int) -> int:
        return self._status("record", f"{event:#x} {stream}")

    def wait(self, stream: int, event: int, flags: int) -> int:
        if event == DONE:
            self.run()
        return self._status("wait", f"{stream} {event:#x}")

    def get_context(self, into: Any) -> int:
        into[0] = self.context
        return 0

    def push(self, context: int) -> int:
        return self._status("push", f"{context:#x}")

    def pop(self, into: Any) -> int:
        return self._status("pop", "")

    def install(self) -> None:
        """Have the library call these."""
        pointer, address = ctypes.c_void_p, ctypes.c_uint64
        kinds = (
            (self.copy, [address, address, ctypes.c_size_t, pointer]),
            (self.host_function, [pointer, pointer, pointer]),
            (self.record, [pointer, pointer]),
            (self.wait, [pointer, pointer, ctypes.c_uint]),
            (self.get_context, [ctypes.POINTER(pointer)]),
            (self.push, [pointer]),
            (self.pop, [ctypes.POINTER(pointer)]),
        )
        self._alive = [ctypes.CFUNCTYPE(ctypes.c_int, *takes)(function) for function, takes in kinds]
        table = (pointer * len(kinds))(*(ctypes.cast(function, pointer).value for function in self._alive))
        library.library().exl3_set_share_driver(ctypes.addressof(table))


@contextmanager
def playing(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver that stands in for the real one, in C++ and in Python."""
    fake = FakeDriver()
    fake.install()
    monkeypatch.setattr(share, "_load_functions", lambda: None)
    monkeypatch.setattr(real, "side_stream", lambda: (CONTEXT, SIDE, READY, DONE))
    monkeypatch.setattr(real, "end_side_stream", lambda *_: None)
    monkeypatch.setattr(real, "wait_event", lambda stream, event: fake.wait(stream, event, 0))
    monkeypatch.setattr(runtime, "current_stream", lambda index: MAIN)
    try:
        yield fake
    finally:
        nothing = (ctypes.c_void_p * 7)()
        library.library().exl3_set_share_driver(ctypes.addressof(nothing))
