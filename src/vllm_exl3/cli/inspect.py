"""``vllm-exl3 inspect``: what a pack holds, what is wrong with it, how far it can be split. Headers only."""

import os.path
from typing import Annotated

import typer

__all__ = ["inspect", "say_unused"]


def inspect(
    pack: Annotated[str, typer.Argument(help="A folder, or a Hub repository such as owner/name.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, such as 4.0bpw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what an EXL3 pack holds and whether it can be served. Reads headers only, never weights.

    The exit status is 1 when the pack has a fault.
    """
    from vllm_exl3.pack.errors import Exl3PackError
    from vllm_exl3.pack.pack import Pack
    from vllm_exl3.plan.survey import survey

    say_unused(pack, revision)
    try:
        found = survey(Pack.open(pack, revision))
    except Exl3PackError as error:
        if not as_json:
            raise
        found = {"source": pack, "faults": [error.parts()]}
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
    else:
        from vllm_exl3.cli.tables import print_survey

        print_survey(found)
    if found["faults"]:
        raise typer.Exit(1)


def say_unused(pack: str, revision: str | None) -> None:
    """Tell whoever asks for a revision of a folder that it has none."""
    if revision is not None and os.path.isdir(os.path.expanduser(pack)):
        typer.echo(f"--revision {revision} is not used: {pack} is a folder here", err=True)
