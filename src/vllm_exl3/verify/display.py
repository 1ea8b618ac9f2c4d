"""Shows what `verify` does, how far it is and when it will be done."""

from contextlib import AbstractContextManager

from rich.console import Console

from vllm_exl3.tools.progress import BYTES, Advance, progress, units

__all__ = ["Display"]


class Display:
    """The account of a run on a console; a progress function takes how many more units are done."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Print one line of plain text."""
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def progress(
        self, step: str, total: float, unit: str | None = None, scale: float = 1.0
    ) -> AbstractContextManager[Advance]:
        """Show the progress of one step.

        Args:
            step: what is being done.
            total: how many units there are.
            unit: what ``scale`` units are called, such as M weights; None for bytes.
            scale: units that one ``unit`` of the text has.
        """
        return progress(self.console, f"  {step}", total, BYTES if unit is None else units(unit, scale))
