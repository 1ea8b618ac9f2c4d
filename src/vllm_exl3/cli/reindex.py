"""``vllm-exl3 reindex``: a new index for a pack whose index disagrees with its files."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["reindex"]

_SAMPLES = 3


def reindex(pack: Annotated[Path, typer.Argument(help="Folder of the pack.")]) -> None:
    """Write an index that names every tensor of PACK's files, beside the old one and never over it.

    vLLM reads only files that model.safetensors.index.json names, so one of another revision loses tensors. The new
    one is model.safetensors.index.json.new; it comes into use when you rename it, by the command that is printed.
    Where there is no old index it takes the name itself. Reads headers only. The exit status is 1 when the old index
    lists tensors that no file holds.
    """
    from vllm_exl3.pack.files import INDEX
    from vllm_exl3.pack.wording import counted
    from vllm_exl3.tools.index_writer import write_index

    written = write_index(pack)
    typer.echo(f"{written.path}: {counted(written.tensors, 'tensor')}")
    for names, what in (
        (written.added, "that the old index lacks"),
        (written.moved, "that the old index has in another file"),
        (written.removed, "that the old index lists and no file holds: fetch the pack again if the model needs them"),
    ):
        if names:
            more = " …" if len(names) > _SAMPLES else ""
            typer.echo(f"  {counted(len(names), 'tensor')} {what} ({', '.join(names[:_SAMPLES])}{more})")
    if written.path.name != INDEX:
        typer.echo(f"  the old index is untouched; to use the new one: mv '{written.path}' '{pack / INDEX}'")
    if written.removed:
        raise typer.Exit(1)
