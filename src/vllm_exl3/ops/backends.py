"""Which backend serves an op on which device, decided once and explained.

A backend module registers a function for an op and a device type together with a check that says
why it cannot run here (no compiler at install time, an old GPU, a missing package). `select` takes
the first usable one in registration order and keeps what the others answered for the report.
"""

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_exl3 import env

__all__ = [
    "Backend",
    "Choice",
    "FusedLinear",
    "calls",
    "count_call",
    "count_reconstructed",
    "find",
    "reconstructed_bytes",
    "register_backend",
    "reset_calls",
    "select",
]

_MODULES = {
    "cpu": ("vllm_exl3.cpu.backend", "vllm_exl3.cpu.moe", "vllm_exl3.cpu.rows"),
    "cuda": ("vllm_exl3.cuda.backend", "vllm_exl3.cuda.embedding"),
}
"""Modules that register backends for a device type; imported at the first `select` for it."""

_VARIABLES = {"moe": env.MOE_KERNEL, "embedding": env.EMBEDDING_KERNEL, "ngram": env.NGRAM_KERNEL}
"""Which environment variable chooses an op's backend, where it is not that of the linears."""


@dataclass(frozen=True)
class FusedLinear:
    """A backend's linears that take in what comes before them, for the ops of `vllm_exl3.ops.fused_linear`.

    Attributes:
        serves: (shards, width of the linear's input, dtype): whether it serves a layer on the current device.
        rms_norm: (x, residual or None, norm weight, epsilon, layer): the output, and x + residual where there is one.
        silu_and_mul: (x, layer): the output.
    """

    serves: Callable[[tuple[int, ...], int, Any], bool]
    rms_norm: Callable[..., Any]
    silu_and_mul: Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """One implementation of one op.

    Attributes:
        op: the op's name, such as ``linear``.
        device: the torch device type it runs on.
        name: what the report and the environment variables call it.
        function: takes the op's arguments.
        unavailable: returns why it cannot run in this process, or None when it can.
        prepare: makes layers ready to run on a device, given what their op's kernels depend on (for linears the shard
            layout and input width): what has to be compiled is compiled while the model loads, never in a request.
            None where nothing is needed.
        fused: for linears, the kernels that also compute a norm or an activation; None where there are none.
    """

    op: str
    device: str
    name: str
    function: Callable[..., Any]
    unavailable: Callable[[], str | None]
    prepare: Callable[[Iterable[Any], Any], None] | None = None
    fused: FusedLinear | None = None


@dataclass(frozen=True)
class Choice:
    """The backend that serves an op on a device type, and why the others do not."""

    backend: Backend
    declined: dict[str, str] = field(default_factory=dict)


_backends: dict[tuple[str, str], list[Backend]] = {}
_choices: dict[tuple[str, str], Choice] = {}
_calls: Counter[tuple[str, str, str]] = Counter()
_reconstructed: Counter[str] = Counter()
_lock = threading.Lock()


def register_backend(backend: Backend) -> None:
    """Add a backend after those already registered for its op and device."""
    with _lock:
        known = _backends.setdefault((backend.op, backend.device), [])
        known[:] = [other for other in known if other.name != backend.name] + [backend]
        _choices.pop((backend.op, backend.device), None)


def select(op: str, device: str, reference: Callable[..., Any]) -> Choice:
    """The backend for ``op`` on ``device``: the wanted one, else the first that can run.

    Args:
        op: the op's name.
        device: a torch device type.
        reference: the op's plain PyTorch implementation, which runs anywhere.

    Raises:
        RuntimeError: ``VLLM_EXL3_LINEAR_KERNEL`` (``…_MOE_KERNEL``) names a backend that cannot run here.
    """
    choice = _choices.get((op, device))
    if choice is None:
        for module in _MODULES.get(device, ()):
            importlib.import_module(module)
        with _lock:
            choice = _choices[op, device] = _choose(op, device, reference)
    return choice


def find(op: str, device: str, name: str) -> Backend | None:
    """A registered backend by name, whether or not it is the one that is chosen."""
    return next((backend for backend in _backends.get((op, device), ()) if backend.name == name), None)


def _choose(op: str, device: str, reference: Callable[..., Any]) -> Choice:
    variable = _VARIABLES.get(op, env.LINEAR_KERNEL)
    wanted = variable.get()
    plain = Backend(op, device, "reference", reference, lambda: None)
    declined: dict[str, str] = {}
    for backend in [*_backends.get((op, device), []), plain]:
        if wanted not in ("auto", backend.name):
            declined[backend.name] = f"{variable.name}={wanted}"
        elif (reason := backend.unavailable()) is not None:
            declined[backend.name] = reason
        else:
            return Choice(backend, declined)
    # Only the wanted one's reason tells anything: the others were declined because they are not it.
    reason = declined.get(wanted, f"there is no such kernel for this device, only {', '.join(declined)}")
    raise RuntimeError(
        f"{variable.name}={wanted} cannot serve {op} on {device} ({reason}). "
        "Set it to auto, or do what the reason asks for."
    )


def count_call(op: str, backend: str, layer_class: str) -> None:
    """Count one execution of an op; the report and the diagnostics read these counts.

    A CUDA graph counts when it is captured, not when it is replayed; threads may lose a count to each other.
    """
    _calls[op, backend, layer_class] += 1


def count_reconstructed(nbytes: int) -> None:
    """Count dense weights that were decoded into memory, to be multiplied by there; like `count_call` for graphs."""
    _reconstructed["bytes"] += nbytes


def reconstructed_bytes() -> int:
    """Bytes of dense weights that this process has decoded into memory so far."""
    return _reconstructed["bytes"]


def calls() -> dict[tuple[str, str, str], int]:
    """Executions so far in this process by (op, backend, layer class)."""
    return dict(_calls)


def reset_calls() -> None:
    """Forget the counts, so that a test can assert which path served what follows."""
    _calls.clear()
    _reconstructed.clear()
