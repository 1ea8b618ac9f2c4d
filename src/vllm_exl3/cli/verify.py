"""``vllm-exl3 verify``: reads every byte of a pack and says what is wrong with it."""

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["verify"]


def verify(
    pack: Annotated[str, typer.Argument(help="Folder of the pack.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Check what a pack's tensors contain: every byte, in one pass.

    The exit status is 1 when something is found.
    """
    from rich.console import Console

    from vllm_exl3.pack import Pack
    from vllm_exl3.verify.display import Display
    from vllm_exl3.verify.run import check_tensors, write_json

    display = Display(Console())
    opened = Pack.open(pack)
    findings, figures = check_tensors(opened, display)
    report: dict[str, Any] = {"pack": opened.source, "tensors": figures}
    report["findings"] = [finding.as_dict() for finding in findings]
    for finding in findings:
        display.say(f"FAULT  {finding.where}\n  check     {finding.check}\n  found     {finding.found}\n"
                    f"  expected  {finding.expected}")  # fmt: skip
    if json_file is not None:
        write_json(json_file, report)
    if findings:
        raise typer.Exit(1)
    display.say("No faults. Flipped signs and exchanged tensors of one shape and K show only with --against.")
