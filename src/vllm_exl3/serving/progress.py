"""How far loading has come, in bytes, and which phase of start-up runs: silence for minutes reads as a hang."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from vllm_exl3.pack.wording import byte_size

__all__ = ["LoadProgress", "phase"]

logger = logging.getLogger("vllm.exl3")

_EVERY = 5.0
"""Seconds between lines; what loads faster gets the closing line only."""


class LoadProgress:
    """Counts the bytes of trellises that have arrived.

    Args:
        clock: seconds, from any start.
        log: takes one line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, log: Callable[[str], None] | None = None) -> None:
        self._clock = clock
        self._log = log or (lambda line: logger.info("%s", line))
        self._done = 0
        self._began = self._said = 0.0

    def add(self, nbytes: int, total: Callable[[], int]) -> None:
        """Note a loaded tensor; the first one, or one after everything had arrived, begins a new count.

        Args:
            nbytes: its bytes.
            total: how many bytes there are in all; asked for when a line is due.
        """
        now = self._clock()
        if not self._done:
            self._began = self._said = now
            self._total = total()
        self._done += nbytes
        elapsed = now - self._began
        if self._done >= self._total:
            self._log(f"vllm-exl3 loaded {byte_size(self._total)} in {elapsed:.1f} s{_rate(self._done, elapsed)}")
            self._done = 0
        elif now - self._said >= _EVERY:
            self._said = now
            left = (self._total - self._done) * elapsed / self._done
            self._log(
                f"vllm-exl3 loading: {byte_size(self._done)} of {byte_size(self._total)} "
                f"({self._done / self._total:.0%}){_rate(self._done, elapsed)}, {left:.0f} s left"
            )


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Log that a phase begins and how long it took.

    Args:
        name: what is done, such as "making kernels ready".
    """
    logger.info("vllm-exl3 %s", name)
    began = time.monotonic()
    yield
    logger.info("vllm-exl3 %s took %.1f s", name, time.monotonic() - began)


def _rate(nbytes: float, seconds: float) -> str:
    return f", {byte_size(nbytes / seconds)}/s" if seconds > 0 else ""
