"""This package's counters in vLLM's ``/metrics``: calls by kernel path, fallbacks, bytes, KV-cache type.

``vllm serve`` answers ``/metrics`` in its front process and runs models in others. Each of those leaves its counters
in a file every few seconds; a collector in the front process's Prometheus registry reads the files when it is asked.
The folder's name goes from the front process to the others in their environment.

With several front processes (``--api-server-count``), vLLM answers from prometheus_client's own files, which every
process writes; so do the processes that run models then (`metrics_shared`).
"""

import atexit
import contextlib
import json
import logging
import os
import re
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
from vllm_exl3.serving.metrics_shared import (
    CALLS,
    FALLBACK_CALLS,
    FALLBACKS,
    KV_TYPES,
    RECONSTRUCTED,
    WEIGHT_BYTES,
    SharedMetrics,
    several_front_processes,
    summed,
)

__all__ = ["Exl3Collector", "leave_counters", "register_metrics", "snapshot"]

logger = logging.getLogger("vllm.exl3")

_EVERY = 2.0
"""Seconds between two writes of a worker's counters."""

_LONGEST_WRITE = 2.0
"""Seconds that the end of a process waits for a write under way."""

_STALE = 60.0
"""Seconds after which a file that nobody wrote is of a process that ended, perhaps of an earlier server."""

_FOLDER = re.compile(r"vllm-exl3-(\d{1,9})-[0-9a-f]{8}")
"""What a server calls its folder of counters: its process (larger numbers are none, and the system call takes only 32
bits), and what tells it from earlier ones of that number."""

_writer: threading.Thread | None = None
"""The thread that writes this process's counters."""

_ending = threading.Event()
"""Set when this process ends: what is not written then is not missed."""


def register_metrics() -> None:
    """Add the collector to the registry, and name the folder that other processes of this engine write to."""
    if not env.METRICS_FOLDER.get():
        _remove_abandoned_folders(Path(tempfile.gettempdir()))
        folder = Path(tempfile.gettempdir()) / f"vllm-exl3-{os.getpid()}-{os.urandom(4).hex()}"
        os.environ[env.METRICS_FOLDER.aliases[0]] = str(folder)
        atexit.register(_end, folder)
    REGISTRY.register(Exl3Collector())


def leave_counters(kv_cache_dtype: str) -> None:
    """Begin to write this process's counters, once it has a model.

    Args:
        kv_cache_dtype: the type that the KV cache really has.
    """
    global _writer  # noqa: PLW0603  one thread a process, whatever number of models
    _kv_types.add(kv_cache_dtype)
    folder = env.METRICS_FOLDER.get()
    if _writer is not None or not folder:
        return
    _writer = threading.Thread(target=_write_forever, args=(Path(folder),), daemon=True, name="vllm-exl3-metrics")
    _writer.start()


def snapshot() -> dict[str, Any]:
    """This process's counters, as they are written."""
    memory: dict[str, int] = {}
    for model in report.reports():
        # A copy: another thread may be loading.
        for kind, nbytes in dict(model.bytes).items() if model.alive else ():
            memory[kind] = memory.get(kind, 0) + nbytes
    return {
        "calls": [[*key, count] for key, count in sorted(backends.calls().items())],
        "reconstructed": backends.reconstructed_bytes(),
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
        calls = CounterMetricFamily(*CALLS.described, labels=CALLS.labels)
        fallbacks = CounterMetricFamily(*FALLBACK_CALLS.described, labels=FALLBACK_CALLS.labels)
        reconstructed = CounterMetricFamily(*RECONSTRUCTED.described, labels=RECONSTRUCTED.labels)
        memory = GaugeMetricFamily(*WEIGHT_BYTES.described, labels=WEIGHT_BYTES.labels)
        types = GaugeMetricFamily(*KV_TYPES.described, labels=KV_TYPES.labels)
        found = _all_snapshots()
        for labels, count in summed((tuple(row[:3]), row[3]) for one in found for row in one["calls"]):
            calls.add_metric(labels, count)
        for labels, count in summed(
            ((row[0],), row[3]) for one in found for row in one["calls"] if row[1] in FALLBACKS
        ):
            fallbacks.add_metric(labels, count)
        reconstructed.add_metric((), sum(one["reconstructed"] for one in found))
        for labels, count in summed(((kind,), size) for one in found for kind, size in one["bytes"].items()):
            memory.add_metric(labels, count)
        for dtype in sorted({dtype for one in found for dtype in one["kv_cache_dtypes"]}):
            types.add_metric([dtype], 1)
        yield from (calls, fallbacks, reconstructed, memory, types)


_kv_types: set[str] = set()


def _remove_abandoned_folders(parent: Path) -> None:
    """Remove what servers that were killed have left, of this user and without a write for a while.

    A process that is not seen may be another container's, whose temporary folder is shared: time has to tell too.
    """
    for path in parent.glob("vllm-exl3-*"):
        name = _FOLDER.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another start removes it at the same time
            if name is None or path.is_symlink() or path.stat().st_uid != os.getuid() or _runs(int(name[1])):
                continue
            written = max(file.stat().st_mtime for file in (path, *path.iterdir()))
            if time.time() - written > _STALE:
                shutil.rmtree(path)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _all_snapshots() -> list[dict[str, Any]]:
    own = f"{os.getpid()}.json"
    found = [snapshot()]
    folder = env.METRICS_FOLDER.get()
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        # A process that ends takes its file along; what is nested too deep is none of ours.
        with contextlib.suppress(OSError, ValueError, RecursionError):
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
        and type(content.get("reconstructed")) is int
        and isinstance(memory, dict)
        and all(type(size) is int for size in memory.values())
        and isinstance(types, list)
        and all(type(dtype) is str for dtype in types)
    )


def _end(folder: Path) -> None:
    _ending.set()
    if _writer is not None:  # a write under way would make the folder anew
        _writer.join(timeout=_LONGEST_WRITE)
    shutil.rmtree(folder, ignore_errors=True)


def _write_forever(folder: Path) -> None:
    file = folder / f"{os.getpid()}.json"
    shared = SharedMetrics() if several_front_processes() else None
    told = False
    while not _ending.wait(_EVERY):
        try:
            if shared is not None:
                shared.write(snapshot())
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():  # temporary folders are shared
                logger.warning("vllm-exl3: %s is another user's: /metrics lacks this process's counters", folder)
                return
            unfinished = file.with_suffix(".part")
            unfinished.write_text(json.dumps(snapshot()))
            unfinished.replace(file)
        except OSError as error:  # the front process removes the folder when it ends
            if not told and not _ending.is_set():
                logger.warning("vllm-exl3: /metrics lacks this process's counters: %s", error)
            told = True
