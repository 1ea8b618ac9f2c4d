"""What the metrics are called, and how processes leave them where prometheus_client adds them up itself.

With ``--api-server-count`` above 1 vLLM names a folder in ``PROMETHEUS_MULTIPROC_DIR`` and answers ``/metrics`` from
the files in it, so that any front process speaks for all. Collectors of a front process are not asked then; metrics of
any other process are, if it has made them after the folder was named.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

__all__ = [
    "CALLS",
    "FALLBACKS",
    "FALLBACK_CALLS",
    "KV_TYPES",
    "RECONSTRUCTED",
    "WEIGHT_BYTES",
    "SharedMetrics",
    "several_front_processes",
    "summed",
]

FALLBACKS = ("reference", "reconstruct", "triton", "vllm")
"""Backends that serve what this package's fastest kernels do not: plain PyTorch, dense weights; over the int4 KV cache,
the Triton kernel that decodes in place of the CUDA kernels, and vLLM's own attention."""


@dataclass(frozen=True)
class _Metric:
    name: str
    documentation: str
    labels: tuple[str, ...]

    @property
    def described(self) -> tuple[str, str]:
        return self.name, self.documentation


CALLS = _Metric(
    "vllm:exl3_kernel_calls",
    "Executions of EXL3 ops; of a CUDA graph when it is captured, not replayed.",
    ("op", "backend", "layer_class"),
)
FALLBACK_CALLS = _Metric(
    "vllm:exl3_fallback_calls", "Executions of EXL3 ops that this package's fastest kernels did not serve.", ("op",)
)
RECONSTRUCTED = _Metric(
    "vllm:exl3_reconstructed_bytes", "Bytes of dense weights that were decoded into memory to be multiplied by.", ()
)
WEIGHT_BYTES = _Metric("vllm:exl3_weight_bytes", "Bytes of EXL3 weights over all ranks.", ("kind",))
KV_TYPES = _Metric("vllm:exl3_kv_cache_dtype_info", "The KV cache's type.", ("dtype",))


def several_front_processes() -> bool:
    """Whether ``/metrics`` is answered from prometheus_client's files."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


def summed(pairs: Iterable[tuple[tuple[str, ...], int]]) -> list[tuple[tuple[str, ...], int]]:
    """Values added up by their labels, in order."""
    totals: dict[tuple[str, ...], int] = {}
    for labels, count in pairs:
        totals[labels] = totals.get(labels, 0) + count
    return sorted(totals.items())


class SharedMetrics:
    """This process's share of the metrics, in prometheus_client's files; to be made once a process."""

    def __init__(self) -> None:
        # No registry: this process answers nobody, and another's collector may have the names in this one's.
        self._calls = Counter(*CALLS.described, labelnames=CALLS.labels, registry=None)
        self._fallbacks = Counter(*FALLBACK_CALLS.described, labelnames=FALLBACK_CALLS.labels, registry=None)
        self._reconstructed = Counter(*RECONSTRUCTED.described, registry=None)
        self._bytes = Gauge(
            *WEIGHT_BYTES.described, labelnames=WEIGHT_BYTES.labels, registry=None, multiprocess_mode="livesum"
        )
        self._types = Gauge(*KV_TYPES.described, labelnames=KV_TYPES.labels, registry=None, multiprocess_mode="livemax")
        self._written: dict[tuple[str, ...], int] = {}
        self._reconstructed_written = 0
        self._kinds: set[str] = set()

    def write(self, snapshot: dict[str, Any]) -> None:
        """Bring the files to what `metrics.snapshot` gives."""
        for labels, count in summed((tuple(row[:3]), row[3]) for row in snapshot["calls"]):
            grown = max(0, count - self._written.get(labels, 0))
            self._written[labels] = count
            self._calls.labels(*labels).inc(grown)
            if labels[1] in FALLBACKS:
                self._fallbacks.labels(labels[0]).inc(grown)
        reconstructed = snapshot["reconstructed"]
        self._reconstructed.inc(max(0, reconstructed - self._reconstructed_written))
        self._reconstructed_written = reconstructed
        self._kinds |= snapshot["bytes"].keys()
        for kind in self._kinds:  # a model that is gone takes none
            self._bytes.labels(kind).set(snapshot["bytes"].get(kind, 0))
        for dtype in snapshot["kv_cache_dtypes"]:
            self._types.labels(dtype).set(1)
