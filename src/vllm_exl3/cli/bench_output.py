"""What every ``vllm-exl3 bench`` does with its rows: writes them, compares them with a baseline."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_exl3.cli.redaction import redacted

__all__ = ["BaselineOption", "JsonOption", "RoundsOption", "finish", "read_baseline"]


def _usable(path: Path | None) -> Path | None:
    """The file for results; found to be usable before anything is measured."""
    from vllm_exl3.tools.results import check_results_file

    if path is not None:
        check_results_file(path)
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, callback=_usable, help="Write results to this file, as benchmarks/ does."),
]
BaselineOption = Annotated[
    Path | None,
    typer.Option("--compare", metavar="BASELINE.json", help="Print what moved beyond noise since that file of --json."),
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Repeats, from which --compare takes the noise.")]


def read_baseline(path: Path | None) -> dict[str, Any] | None:
    """The results to compare with, read before anything is measured.

    Raises:
        Exl3PackError: the file is none.
    """
    from vllm_exl3.tools.results import read_results

    return None if path is None else read_results(path)


def finish(
    rows: Sequence[Mapping[str, Any]], json_file: Path | None, baseline: Mapping[str, Any] | None, *, gpu: bool
) -> None:
    """Write the rows, and print what moved."""
    from vllm_exl3.tools.compare import changes
    from vllm_exl3.tools.results import write_results

    if json_file is not None:
        command = redacted(shlex.join(["vllm-exl3", *sys.argv[1:]]))
        # the commit of the folder that a user happens to be in says nothing
        facts = {"commit": None}
        write_results(json_file, rows, machine="gpu" if gpu else "cpu", command=command, facts=facts)
        typer.echo(f"wrote {json_file}")
    if baseline is None:
        return
    moved, compared = changes(baseline["rows"], rows)
    if not compared:
        typer.echo("nothing to compare: the baseline has no row of the same settings")
        return
    for change in moved:
        typer.echo(change.line())
    typer.echo(f"{len(moved)} of {compared} measures moved beyond noise")
