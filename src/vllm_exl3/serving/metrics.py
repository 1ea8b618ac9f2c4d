"""This package's counters in vLLM's ``/metrics``: calls by kernel path, fallbacks, bytes of weights, KV-cache type.

``vllm serve`` answers ``/metrics`` in its front process and runs models in others. Each of those leaves its counters
in a file every few seconds; a collector in the front process's Prometheus registry reads the files when it is asked.
The folder's name goes from the front process to the others in their environment.
"""

import atexit
import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_exl3 import env
from vllm_exl3.ops import backends
from vllm_exl3.serving import report

__all__ = ["Exl3Collector", "leave_counters", "register_metrics", "snapshot"]

logger = logging.getLogger("vllm.exl3")

_EVERY = 2.0
"""Seconds between two writes of a worker's counters."""

_STALE = 60.0
"""Seconds after which a file that nobody wrote is of a process that ended, perhaps of an earlier server."""

_FALLBACKS = ("reference", "reconstruct")
"""Backends that serve what no kernel of this package serves here."""

_started = False


def register_metrics() -> None:
    """Add the collector to the registry, and name the folder that other processes of this engine write to."""
    if not env.METRICS_FOLDER.get():
        folder = Path(tempfile.gettempdir()) / f"vllm-exl3-{os.getpid()}-{os.urandom(4).hex()}"
        os.environ[env.METRICS_FOLDER.aliases[0]] = str(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    REGISTRY.register(Exl3Collector())


def leave_counters(kv_cache_dtype: str) -> None:
    """Begin to write this process's counters, once it has a model.

    Args:
        kv_cache_dtype: the type that the KV cache really has.
    """
    global _started  # noqa: PLW0603  one thread a process, whatever number of models
    _kv_types.add(kv_cache_dtype)
    folder = env.METRICS_FOLDER.get()
    if _started or not folder:
        return
    _started = True
    threading.Thread(target=_write_forever, args=(Path(folder),), daemon=True, name="vllm-exl3-metrics").start()


def snapshot() -> dict[str, Any]:
    """This process's counters, as they are written."""
    memory: dict[str, int] = {}
    for model in report.reports():
        # A copy: another thread may be loading.
        for kind, nbytes in dict(model.bytes).items() if model.alive else ():
            memory[kind] = memory.get(kind, 0) + nbytes
    return {
        "calls": [[*key, count] for key, count in sorted(backends.calls().items())],
        "bytes": memory,
        "kv_cache_dtypes": sorted(_kv_types),
    }


class Exl3Collector:
    """What all processes of this engine have counted."""

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks for no counters yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics, added up over processes."""
        calls = CounterMetricFamily(
            "vllm:exl3_kernel_calls", "Executions of EXL3 ops; of a CUDA graph when it is captured, not replayed.",
            labels=["op", "backend", "layer_class"],
        )  # fmt: skip
        fallbacks = CounterMetricFamily(
            "vllm:exl3_fallback_calls", "Executions of EXL3 ops that no kernel of this package served.", labels=["op"]
        )
        memory = GaugeMetricFamily("vllm:exl3_weight_bytes", "Bytes of EXL3 weights over all ranks.", labels=["kind"])
        types = GaugeMetricFamily("vllm:exl3_kv_cache_dtype_info", "The KV cache's type.", labels=["dtype"])
        found = _all_snapshots()
        for labels, count in _summed((tuple(row[:3]), row[3]) for one in found for row in one["calls"]):
            calls.add_metric(labels, count)
        for labels, count in _summed(
            ((row[0],), row[3]) for one in found for row in one["calls"] if row[1] in _FALLBACKS
        ):
            fallbacks.add_metric(labels, count)
        for labels, count in _summed(((kind,), size) for one in found for kind, size in one["bytes"].items()):
            memory.add_metric(labels, count)
        for dtype in sorted({dtype for one in found for dtype in one["kv_cache_dtypes"]}):
            types.add_metric([dtype], 1)
        yield from (calls, fallbacks, memory, types)


_kv_types: set[str] = set()


def _summed(pairs: Iterator[tuple[tuple[str, ...], int]]) -> list[tuple[tuple[str, ...], int]]:
    totals: dict[tuple[str, ...], int] = {}
    for labels, count in pairs:
        totals[labels] = totals.get(labels, 0) + count
    return sorted(totals.items())


def _all_snapshots() -> list[dict[str, Any]]:
    own = f"{os.getpid()}.json"
    found = [snapshot()]
    folder = env.METRICS_FOLDER.get()
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        with contextlib.suppress(OSError, ValueError):  # a process that ends takes its file along
            if path.name != own and time.time() - path.stat().st_mtime < _STALE:
                content = json.loads(path.read_text())
                if _is_snapshot(content):
                    found.append(content)
    return found


def _is_snapshot(content: Any) -> bool:
    """Whether a file holds what `snapshot` gives: one of other contents must not cost the server its ``/metrics``."""
    if not isinstance(content, dict):
        return False
    calls, memory, types = (content.get(name) for name in ("calls", "bytes", "kv_cache_dtypes"))
    return (
        isinstance(calls, list)
        and all(isinstance(row, list) and [type(value) for value in row] == [str, str, str, int] for row in calls)
        and isinstance(memory, dict)
        and all(type(size) is int for size in memory.values())
        and isinstance(types, list)
        and all(type(dtype) is str for dtype in types)
    )


def _write_forever(folder: Path) -> None:
    stop = threading.Event()
    file = folder / f"{os.getpid()}.json"
    told = False
    while not stop.wait(_EVERY):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():  # temporary folders are shared
                logger.warning("vllm-exl3: %s is another user's: /metrics lacks this process's counters", folder)
                return
            unfinished = file.with_suffix(".part")
            unfinished.write_text(json.dumps(snapshot()))
            unfinished.replace(file)
        except OSError as error:  # the front process removes the folder when it ends
            if not told:
                logger.warning("vllm-exl3: /metrics lacks this process's counters: %s", error)
            told = True
