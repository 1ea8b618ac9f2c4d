"""Routing statistics: slots (token, choice) that each expert got, counted on the device and added to a file.

``VLLM_EXL3_EXPERTS_STATS`` names the file (`vllm_exl3.plan.expert_usage`). Counting is a few operations on tensors in
the model's forward, so CUDA graphs contain it. A thread reads the counts now and then; nothing waits for it.

vLLM routes invented tokens while it measures memory, warms up and captures graphs. What was counted until then is left
out: a capture, and before the first real forward one without attention metadata, sets all back.
"""

import atexit
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_exl3 import env
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.plan.expert_usage import add_usage

__all__ = ["RoutingCounter", "UsageRecorder", "recorder"]

logger = logging.getLogger("vllm.exl3")

_LOOK = 5.0
"""Seconds between two looks at whether vLLM has routed invented tokens."""

_WRITE = 60.0
"""Seconds between two writes."""


class RoutingCounter:
    """The counts of one layer.

    Args:
        key: the layer in the pack.
        experts: of the whole model.
        recorder: is told of invented tokens.
    """

    def __init__(self, key: str, experts: int, recorder: "UsageRecorder") -> None:
        self.key = key
        self._experts = experts
        self._recorder = recorder
        self._one: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None

    def count(self, topk_ids: torch.Tensor) -> None:
        """Count a batch's routing ``[M, top_k]``; numbers of no expert count for none."""
        if self.counts is None:
            # Made at the first forward, not while loading: what is allocated then is lost when the engine sleeps.
            self.counts = torch.zeros(self._experts + 1, dtype=torch.int64, device=topk_ids.device)
            self._one = torch.ones(1, dtype=torch.int64, device=topk_ids.device)
        assert self._one is not None
        self._recorder.note_forward(topk_ids.device)
        ids = topk_ids.flatten().long()
        places = torch.where((ids < 0) | (ids >= self._experts), self._experts, ids)
        self.counts.scatter_add_(0, places, self._one.expand(places.shape))


class UsageRecorder:
    """Adds this process' counts to the file, in a thread of its own.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._counters: list[tuple[RoutingCounter, weakref.ref[Any]]] = []
        self._written: dict[int, list[int]] = {}
        self._invented, self._served = True, False
        self._stream: torch.cuda.Stream | None = None
        self._end = threading.Event()

    def start(self) -> None:
        """Begin to look and write, until the process ends."""
        threading.Thread(target=self._run, daemon=True, name="vllm-exl3-usage").start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End, and write what was counted."""
        self._end.set()
        self.flush()

    def counter(self, key: str, experts: int, owner: object) -> RoutingCounter:
        """A counter for a layer, read until its owner is gone."""
        counter = RoutingCounter(key, experts, self)
        with self._lock:
            self._counters.append((counter, weakref.ref(owner)))
        return counter

    def note_forward(self, device: torch.device) -> None:
        """Note whether vLLM is warming up or capturing graphs."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._invented = True
        elif is_forward_context_available() and get_forward_context().attn_metadata is not None:
            self._served = True
        elif not self._served:
            self._invented = True

    def look(self) -> None:
        """Leave out what was counted so far if tokens were invented since the last look."""
        with self._lock:
            if self._invented:
                self._invented = False
                self._written = self._read()

    def flush(self) -> None:
        """Add what was counted since the last time to the file."""
        self.look()
        with self._lock:
            counts, added = self._read(), {}
            for counter, _ in self._counters:
                before = self._written.get(id(counter), [0] * counter._experts)
                now = counts.get(id(counter), before)
                if now != before:
                    added[counter.key] = [new - old for new, old in zip(now, before, strict=True)]
            self._written = counts
            self._counters = [entry for entry in self._counters if entry[1]() is not None]
        if added:
            try:
                add_usage(self._path, added)
            except (OSError, Exl3PackError) as error:
                logger.warning("vllm-exl3: routing statistics were not written to %s: %s", self._path, error)

    def _read(self) -> dict[int, list[int]]:
        """The counts of every layer that has run, past whatever the model's own streams are doing."""
        tensors = {id(counter): counter.counts for counter, _ in self._counters if counter.counts is not None}
        if not tensors:
            return {}
        device = next(iter(tensors.values())).device
        if device.type != "cuda":
            return {name: counts[:-1].tolist() for name, counts in tensors.items()}
        _allow_during_capture()
        with torch.cuda.device(device):
            self._stream = self._stream or torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                found = {
                    name: torch.empty(counts.shape, dtype=torch.int64, device="cpu") for name, counts in tensors.items()
                }
                for name, counts in tensors.items():
                    found[name].copy_(counts)
            self._stream.synchronize()
        return {name: counts[:-1].tolist() for name, counts in found.items()}

    def _run(self) -> None:
        written = time.monotonic()
        while not self._end.wait(_LOOK):
            try:
                self.look()
                if time.monotonic() - written >= _WRITE:
                    written = time.monotonic()
                    self.flush()
            except RuntimeError as error:  # the device failed: the engine says so itself
                logger.warning("vllm-exl3: routing statistics end here: %s", error)
                return


def _allow_during_capture() -> None:
    """Let this thread copy while another captures a graph, which would fail otherwise."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.cuThreadExchangeStreamCaptureMode(relaxed)


_recorders: dict[str, UsageRecorder] = {}


def recorder() -> UsageRecorder | None:
    """The recorder of this process, where statistics are asked for."""
    name = env.EXPERTS_STATS.get()
    if not name:
        return None
    if name not in _recorders:
        _recorders[name] = UsageRecorder(Path(name))
        _recorders[name].start()
    return _recorders[name]
