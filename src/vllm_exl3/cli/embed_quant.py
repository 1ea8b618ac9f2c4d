"""``vllm-exl3 embed-quant``: a model's 16-bit token embedding as int8 or int4 rows."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["embed_quant"]


class Bits(Enum):
    """Widths that exist."""

    FOUR = "4"
    EIGHT = "8"


def embed_quant(
    source: Annotated[Path, typer.Argument(help="Folder of the model: an EXL3 pack, or any Hugging Face model.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    bits: Annotated[Bits, typer.Option(help="8: one scale a row. 4: one scale for each 128 columns.")],
    module: Annotated[str | None, typer.Option(help="Name of the embedding, where it is not recognised.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the other files instead of hard-linking them.")] = False,
) -> None:
    """Write TARGET: SOURCE with its 16-bit token embedding replaced by an int8 or int4 table.

    Needs the free space of the rewritten file. TARGET appears once it is complete and verified.
    """
    from rich.console import Console

    from vllm_exl3.pack.wording import format_bytes
    from vllm_exl3.tools.progress import phases
    from vllm_exl3.tools.table_writer import quantize_embedding

    try:
        with phases(Console(stderr=True)) as show:
            result = quantize_embedding(source, target, int(bits.value), module=module, copy=copy, progress=show)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: nothing was saved, {target} was not written", err=True)
        raise typer.Exit(130) from None
    rows, width = result.shape
    typer.echo(
        f"{result.module}: {rows} x {width}, {format_bytes(result.source_bytes)} -> "
        f"{format_bytes(result.table_bytes)}, relative error {result.relative_error:.2e} (read back from {target})"
    )
