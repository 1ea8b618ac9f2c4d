"""Progress of long commands: bars on a terminal; elsewhere plain lines, none for what ends within two seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vllm_exl3.pack.wording import format_bytes

__all__ = ["bytes_progress"]

_QUIET_SECONDS = 2.0

Show = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""


@contextmanager
def bytes_progress(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Show]:
    """Show how many bytes are done, and how long the rest takes.

    Args:
        console: where to.
        clock: seconds, for lines.
    """
    if not console.is_terminal:
        yield _Lines(console, clock)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        bar.start()  # not before there is something to show: a refusal needs no bar
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    try:
        yield show
    finally:
        bar.stop()


class _Lines:
    """A line at each further tenth of a phase, once the phase lasts longer than two seconds."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._what, self._start, self._tenths = "", clock(), 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if what != self._what:
            self._start = now if self._what else self._start
            self._what, self._tenths = what, 0
        tenths = 10 * done // max(total, 1)
        if tenths <= self._tenths or not done or now - self._start < _QUIET_SECONDS:
            return
        self._tenths = tenths
        left = (now - self._start) / done * (total - done)
        text = f"{what}: {10 * tenths} % of {format_bytes(total)}, {left:.0f} s left"
        self._console.out(text, highlight=False)
