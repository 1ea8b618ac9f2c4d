"""Progress of every long command: a bar on a terminal, plain lines elsewhere and none for what ends within two seconds.

Both say what is done, how far it is, how fast, and how long the rest takes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_exl3.pack.wording import format_bytes

__all__ = ["BYTES", "Advance", "Unit", "phases", "progress", "units"]

_QUIET_SECONDS = 2.0
_LINE_SECONDS = 10.0
"""Without a terminal, seconds between two lines of a step that takes long to advance by a tenth."""


@dataclass(frozen=True)
class Unit:
    """How amounts are written: ``text(amount)``, such as ``3.1 GiB``."""

    text: Callable[[float], str]


BYTES = Unit(lambda amount: format_bytes(int(amount)))


def units(name: str, scale: float = 1.0) -> Unit:
    """A unit by name, such as ``M weights`` with a scale of 1e6."""
    return Unit(lambda amount: f"{amount / scale:.3g} {name}")


class Advance(Protocol):
    """Takes how much more is done, and the part that is worked on."""

    def __call__(self, amount: float, part: str = "") -> None:
        """Advance the display."""


@contextmanager
def progress(
    console: Console,
    what: str,
    total: float,
    unit: Unit,
    *,
    done: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    start: float | None = None,
) -> Iterator[Advance]:
    """Show how much of ``total`` is done.

    Args:
        console: where to.
        what: what is being done.
        total: how much there is to do.
        unit: how amounts are written.
        done: what an earlier run did, which does not count as speed.
        clock: seconds.
        start: when the work began by that clock; now, if None.
    """
    step = _Step(what, total, unit, done, clock, clock() if start is None else start)
    if not console.is_terminal:
        yield lambda amount, part="": _line(console, step, amount, part)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(32), TextColumn("{task.percentage:3.0f} %"))
    texts = (TextColumn("{task.fields[rate]}", markup=False), TimeRemainingColumn())
    part_column = TextColumn("{task.fields[part]}", markup=False, style="dim")
    with Progress(*columns, *texts, part_column, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, rate="", part="")
        bar.update(task, completed=done)

        def advance(amount: float, part: str = "") -> None:
            step.add(amount)
            bar.update(task, completed=step.done, rate=step.speed(), part=part)

        yield advance


@contextmanager
def phases(
    console: Console, unit: Unit = BYTES, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """Show phases one after another; yields a function of what is being done, how much is done, and how much in all."""
    with ExitStack() as stack:
        current: tuple[str, Advance] | None = None
        before, last = 0, clock()

        def show(what: str, done: int, total: int) -> None:
            nonlocal current, before, last
            if current is None or current[0] != what:
                stack.close()
                step = progress(console, what, total, unit, clock=clock, start=last)
                current, before = (what, stack.enter_context(step)), 0
            current[1](done - before)
            before, last = done, clock()

        yield show


class _Step:
    """How far a step is, and how fast."""

    def __init__(
        self, what: str, total: float, unit: Unit, done: float, clock: Callable[[], float], start: float
    ) -> None:
        self.what, self.total, self.done = what, total, done
        self._unit, self._clock, self._before = unit, clock, done
        self._start = self._said = start
        self._tenths = self.tenths()

    def add(self, amount: float) -> None:
        """More is done."""
        self.done += amount

    def tenths(self) -> int:
        """Whole tenths that are done; a sum of shares may miss the whole by a rounding error."""
        return int(self.done * 10 / max(self.total, 1e-9) + 1e-6)

    def is_worth_a_line(self) -> bool:
        """Another tenth is done, or nothing was said for long; not in the first two seconds."""
        now, tenths = self._clock(), self.tenths()
        if now - self._start < _QUIET_SECONDS or (tenths <= self._tenths and now - self._said < _LINE_SECONDS):
            return False
        self._tenths, self._said = tenths, now
        return True

    def speed(self) -> str:
        """What one second does, in words."""
        return f"{self._unit.text((self.done - self._before) / max(self._clock() - self._start, 1e-9))}/s"

    def line(self, part: str) -> str:
        """The state as one line."""
        rate = (self.done - self._before) / max(self._clock() - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate > 0 else float("inf")
        percent = int(100 * self.done / max(self.total, 1e-9) + 1e-6)
        text = f"{self.what}: {percent} % of {self._unit.text(self.total)}, {self.speed()}, {left:.0f} s left"
        return f"{text}  {part}" if part else text


def _line(console: Console, step: _Step, amount: float, part: str) -> None:
    step.add(amount)
    if step.is_worth_a_line():
        console.out(step.line(part), highlight=False)
