"""What the demo shows while it works: bars on a terminal, a few plain lines in a log file."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Display", "report_lines"]


class Display:
    """The demo's account of what it does, on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, step: str, text: str) -> None:
        """One line: the step's name (empty for a continuation) and what there is to say."""
        self.console.print(f"  [bold]{step:<11}[/]", end="")
        self.console.out(text, highlight=False)

    def stream(self, text: str) -> None:
        """A piece of a line that is still growing."""
        self.console.out(text, end="", highlight=False)

    @contextmanager
    def progress(self, total: int, done: int = 0) -> Iterator[Callable[[str, float], None]]:
        """Show how much of ``total`` is done, and how long the rest takes.

        Yields a function that takes what was done and how much it was, beside the ``done`` of an earlier run.
        """
        if not self.console.is_terminal:
            yield self._every_tenth(total, done)
            return
        columns = (TextColumn("            "), BarColumn(32), TextColumn("{task.percentage:3.0f} %"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("[dim]{task.description}"))
        with Progress(*columns, *times, console=self.console, transient=True) as bar:
            task = bar.add_task("", total=total, completed=done)

            def advance(what: str, amount: float) -> None:
                bar.update(task, advance=amount, description=what)

            yield advance

    def _every_tenth(self, total: int, before: int) -> Callable[[str, float], None]:
        done, shown, start = float(before), before * 10 // total, time.monotonic()

        def advance(what: str, amount: float) -> None:
            nonlocal done, shown
            done += amount
            # the sum of shares may miss the whole by a rounding error
            if (tenths := int(done * 10 / total + 1e-6)) > shown:
                shown = tenths
                left = (time.monotonic() - start) / (done - before) * (total - done)
                self.say("", f"{shown * 10:3d} %  {left:4.0f} s left  {what}")

        return advance

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show a spinner beside the last line of a log; yields a function that takes that line."""
        if not self.console.is_terminal:
            yield lambda line: None
            return
        with self.console.status(what) as status:

            def update(line: str) -> None:
                room = max(self.console.width - len(what) - 8, 10)
                status.update(f"{what} [dim]{line.rpartition('] ')[2][:room].replace('[', '(')}")

            yield update


def report_lines(log: str) -> list[str]:
    """The start-up report in a server's log, without the prefixes that vLLM puts before each line."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "vllm-exl3 " in line and " serves " in line), None)
    if first is None:
        return []
    start = lines[first].index("vllm-exl3 ")
    block = [lines[first][start:]]
    for line in lines[first + 1 :]:
        # the time in the prefix may have moved on, its length has not
        if not line[start:].startswith("  "):
            break
        block.append(line[start:])
    return block
