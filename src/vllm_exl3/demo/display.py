"""What the demo shows while it works: steps, answers, and how far the quantization is."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console

from vllm_exl3.tools.progress import Advance, progress, units

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

    def progress(self, total: int, done: int = 0) -> AbstractContextManager[Advance]:
        """Show how many of ``total`` weights are quantized, ``done`` of them by an earlier run."""
        return progress(self.console, " " * 13 + "quantizing", total, units("M weights", 1e6), done=done)

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
