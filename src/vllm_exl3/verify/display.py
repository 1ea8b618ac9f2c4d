"""Shows what `verify` does, how far it is and when it will be done: bars on a terminal, plain lines otherwise."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Display"]

_LINE_SECONDS = 5.0
"""Without a terminal, seconds between two lines of one step."""


class Display:
    """The account of a run on a console; a progress function takes how many more units are done."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Print one line of plain text."""
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, step: str, total: float, unit: str, scale: float = 1.0) -> Iterator[Callable[[float], None]]:
        """Show the progress of one step.

        Args:
            step: what is being done.
            total: how many units there are.
            unit: what ``scale`` units are called, such as GB.
            scale: units that one ``unit`` of the text has.
        """
        start = time.monotonic()
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(32), TextColumn("{task.percentage:3.0f} %"))
            rate = TextColumn("{task.fields[rate]}")
            with Progress(*columns, rate, TimeRemainingColumn(), console=self.console, transient=True) as bar:
                task = bar.add_task(step, total=total, rate="")

                def advance(amount: float) -> None:
                    done = bar.tasks[0].completed + amount
                    bar.update(task, advance=amount, rate=_rate(done / scale, time.monotonic() - start, unit))

                yield advance
            return
        yield _lines(self.say, step, total, unit, scale, start)


def _lines(
    say: Callable[[str], None], step: str, total: float, unit: str, scale: float, start: float
) -> Callable[[float], None]:
    done, shown = 0.0, start

    def advance(amount: float) -> None:
        nonlocal done, shown
        done += amount
        now = time.monotonic()
        if now - shown >= _LINE_SECONDS and done < total:
            shown = now
            left = (now - start) / done * (total - done)
            say(f"  {step}: {done / total:.0%}, {_rate(done / scale, now - start, unit)}, {left:.0f} s left")

    return advance


def _rate(amount: float, seconds: float, unit: str) -> str:
    return f"{amount / max(seconds, 1e-9):.3g} {unit}/s"
