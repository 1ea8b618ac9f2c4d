"""The CPU's share of routed experts as work of CUDA streams: pinned request and reply, a host function, two events.

A host function runs when the stream arrives there, and nothing on the host waits for it; a graph holds it like a
kernel. The side stream is forked from the model's by one event and joined by another, so that both shares overlap.
"""

import ctypes
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_exl3.cpu.context import Context
from vllm_exl3.cpu.library import MoECallStruct, library
from vllm_exl3.cpu.moe import moe_struct, reserve
from vllm_exl3.cuda import driver
from vllm_exl3.cuda.driver import DriverError
from vllm_exl3.ops.moe import MoECall
from vllm_exl3.ops.pinned import PinnedWords

__all__ = ["CpuShare", "SideStream"]

_SPIN_US = 200
"""Microseconds for which threads that wait for the next layer spin: longer than its attention takes. Not measured."""

_REMEDY = "Free host memory, or lower VLLM_EXL3_EXPERTS_CPU_ROWS."


class _ShareStruct(ctypes.Structure):
    """``exl3_share``."""

    _fields_ = (
        ("call", MoECallStruct),
        *((name, ctypes.c_void_p) for name in ("routed_ids", "local", "ids")),
        *((name, ctypes.c_int64) for name in ("local_size", "runs")),
        *((name, ctypes.c_int32) for name in ("routed_id_bytes", "status")),
    )


class _LaunchStruct(ctypes.Structure):
    """``exl3_share_launch``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("share", "context", "stream", "side", "ready", "done")),
        *((name, ctypes.c_uint64) for name in ("x", "ids", "weights", "reply")),
    )


_FUNCTIONS = (
    "cuMemcpyAsync",
    "cuLaunchHostFunc",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
)
"""What ``exl3_share_driver`` holds, under the names that the driver exports."""


@functools.lru_cache(maxsize=1)
def _load_functions() -> None:
    functions = driver.driver_functions(_FUNCTIONS)
    if functions is None:
        raise DriverError("experts on the CPU need libcuda.so.1 with " + ", ".join(_FUNCTIONS))
    table = (ctypes.c_void_p * len(functions))(*(function.value for function in functions))
    library().exl3_set_share_driver(ctypes.addressof(table))


class SideStream:
    """What the layers of one model share: a stream and two events, request and reply, and the CPU's threads.

    Layers run one after another, so each finds the memory free; the streams' order sees to that.

    Args:
        threads: that compute.
        cpus: the processor of each but the first, which is the driver's; None for any.
        rows: tokens that a request may have.
        hidden: channels of a token.
        top_k: experts of a token.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None, rows: int, hidden: int, top_k: int) -> None:
        _load_functions()
        self.context = Context(threads, cpus, _SPIN_US)
        self.rows = rows
        what = "requests to experts on the CPU"
        sizes = (2 * rows * hidden, 4 * rows * top_k, 2 * rows * top_k, 2 * rows * hidden)
        self._memory = [PinnedWords(max(size, 1), what, _REMEDY) for size in sizes]
        self.x, self.ids, self.weights, self.reply = (memory.words for memory in self._memory)
        self.local_ids = torch.empty(rows * top_k, dtype=torch.int32, device="cpu")
        self.cuda_context, self.side, self.ready, self.done = driver.side_stream()
        weakref.finalize(self, driver.end_side_stream, self.side, self.ready, self.done)

    def tensors(
        self, tokens: int, hidden: int, top_k: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Request and reply of so many tokens: x, numbers of experts, weights, result."""
        return (
            self.x.view(dtype)[: tokens * hidden].view(tokens, hidden),
            self.local_ids[: tokens * top_k].view(tokens, top_k),
            self.weights.view(torch.float32)[: tokens * top_k].view(tokens, top_k),
            self.reply.view(torch.float32)[: tokens * hidden].view(tokens, hidden),
        )


@dataclass(slots=True)
class _Prepared:
    """A request of one size: the structure, and all that it points to."""

    struct: _ShareStruct
    held: list[torch.Tensor]


class CpuShare:
    """The experts of one layer that the CPU computes.

    Args:
        side: the model's.
        call: the op's arguments with tensors on the CPU; routing is not read.
        local: int32 on the CPU: of each expert of the model, its row in the call's table, or -1.
    """

    def __init__(self, side: SideStream, call: MoECall, local: torch.Tensor) -> None:
        self._side, self._call, self._local = side, call, local
        self._prepared: dict[tuple[int, torch.dtype, int, int], _Prepared] = {}
        self._held: tuple[torch.Tensor, ...] = ()

    @property
    def runs(self) -> int:
        """How often it has computed."""
        return sum(prepared.struct.runs for prepared in self._prepared.values())

    def enqueue(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, stream: int) -> torch.Tensor:
        """Let the CPU begin as soon as a stream has got here; `join` before the result is read.

        Args:
            x: ``[M, hidden]`` on the GPU; at most as many tokens as the side stream has room for.
            weights: float32 ``[M, top_k]``.
            ids: int32 or int64 ``[M, top_k]``, by the numbers of the whole model.
            stream: the current stream of the GPU.

        Returns:
            float32 ``[M, hidden]``: where the sum over these experts will be.

        Raises:
            DriverError: the driver refuses, or an earlier computation failed.
        """
        side, x, weights, ids = self._side, x.contiguous(), weights.float().contiguous(), ids.contiguous()
        prepared = self._prepare(x, ids)
        if prepared.struct.status:
            text = library().exl3_error_text(prepared.struct.status).decode()
            raise DriverError(f"experts on the CPU: {text}")
        # Copies among these must not be freed before the join: the stream would reuse their memory while it is read.
        self._held = (x, weights, ids)
        reply = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        launch = _LaunchStruct(
            ctypes.addressof(prepared.struct),
            side.cuda_context,
            stream,
            side.side,
            side.ready,
            side.done,
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            reply.data_ptr(),
        )
        _check(library().exl3_enqueue_share(ctypes.addressof(launch)))
        return reply

    def join(self, stream: int) -> None:
        """Let a stream wait for the result of the last `enqueue`."""
        driver.wait_event(stream, self._side.done)
        self._held = ()

    def _prepare(self, x: torch.Tensor, ids: torch.Tensor) -> _Prepared:
        key = (len(x), x.dtype, ids.shape[1], ids.element_size())
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = self._make(x, ids)
        return found

    def _make(self, x: torch.Tensor, ids: torch.Tensor) -> _Prepared:
        side, (tokens, hidden), top_k = self._side, x.shape, ids.shape[1]
        request, local_ids, weights, out = side.tensors(tokens, hidden, top_k, x.dtype)
        call = self._call._replace(topk_weights=weights, topk_ids=local_ids, expert_map=None)
        struct, held = moe_struct(request, call, out, side.context)
        reserve(struct)  # or a host function would allocate
        share = _ShareStruct(
            struct, side.ids.data_ptr(), self._local.data_ptr(), local_ids.data_ptr(), len(self._local), 0,
            ids.element_size(), 0,
        )  # fmt: skip
        return _Prepared(share, held)


def _check(status: Any) -> None:
    if status < 0:  # EXL3_BAD_PROGRAM
        raise DriverError(f"experts on the CPU: {library().exl3_error_text(status).decode()}")
    if status:
        raise DriverError(f"experts on the CPU: the driver's status is {status}")
