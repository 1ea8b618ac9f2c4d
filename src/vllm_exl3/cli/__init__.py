"""The ``vllm-exl3`` command. Each sub-command has a file of its own and imports what it needs when it runs."""

import io
import sys
import traceback
from typing import Annotated

import typer

from vllm_exl3 import __version__
from vllm_exl3.cli.bench import bench
from vllm_exl3.cli.demo import demo
from vllm_exl3.cli.doctor import doctor
from vllm_exl3.cli.embed_quant import embed_quant
from vllm_exl3.cli.inspect import inspect
from vllm_exl3.cli.plan import plan
from vllm_exl3.cli.precompile import precompile
from vllm_exl3.cli.reindex import reindex
from vllm_exl3.cli.verify import verify
from vllm_exl3.env_variable import VariableError
from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["app", "main"]

app = typer.Typer(
    name="vllm-exl3",
    help="Serve EXL3 (ExLlamaV3) checkpoints with stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich's tables cut long options, and name a type for those that take no value
)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Serve EXL3 (ExLlamaV3) checkpoints with stock vLLM."""
    if show:
        typer.echo(f"vllm-exl3 {__version__}")
        raise typer.Exit


app.command(short_help="what a pack holds, and whether it can be served")(inspect)
app.command(short_help="a new index for a pack whose index is wrong")(reindex)
app.command(short_help="whether a pack fits, how fast it may be, the command")(plan)
app.command(short_help="whether contents are sound, and how good a pack is")(verify)
app.command(short_help="quantize a small model, serve it, ask it")(demo)
app.command(short_help="a pack with a quantized token embedding")(embed_quant)
app.command(short_help="compile the GPU kernels before a server starts")(precompile)
app.command(short_help="check this machine, and every kernel on it")(doctor)
app.add_typer(bench, name="bench", short_help="measure kernels, servers and loading on this machine")


def main() -> None:
    """Run the command line.

    A faulty pack ends it with its four-part message and exit status 1, a wrong variable or a path that the system
    refuses with one sentence, a full GPU with what it lacks.
    """
    for stream in (sys.stdout, sys.stderr):
        # File names need not be text, and a terminal need not have every character of a tensor's name.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (Exl3PackError, VariableError, OSError) as error:
        typer.echo(_said(error), err=True)
        sys.exit(1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which not every command imports
            raise
        typer.echo(f"{str(error).splitlines()[0]} Ask for less, or end what else uses the GPU.", err=True)
        sys.exit(1)


def _said(error: Exl3PackError | VariableError | OSError) -> str:
    if isinstance(error, Exl3PackError):
        return error.report()
    if not isinstance(error, OSError):
        return str(error)
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    # A full disk or a lost connection names nothing: where it was met is the next best.
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error.strerror or error} (in {place.name}, {place.filename}, line {place.lineno})"
