"""``vllm-exl3 verify``: reads every byte of a pack and says what is wrong with it."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(
    pack: Annotated[str, typer.Argument(help="Folder of the pack.")],
    against: Annotated[str | None, typer.Option(help="The 16-bit model: a folder, or a Hub repository.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text for KL, top-1 and perplexity; needs --against.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.", min=512)] = 8192,
    compare: Annotated[
        list[str] | None, typer.Option(help="Measure another pack, GGUF file or folder, too; repeatable; needs --text.")
    ] = None,
    backends: Annotated[bool, typer.Option(help="Decode a sample with every backend of this machine.")] = True,
    canary: Annotated[
        bool, typer.Option("--canary", help="Serve two prompts with vLLM twice, compare tokens.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    card: Annotated[
        Path | None, typer.Option(help="Write a card (Markdown, JSON, pictures) to this folder; needs --text.")
    ] = None,
) -> None:
    """Check what a pack's tensors contain: every byte, in one pass; with --against also how good it is.

    The exit status is 1 when something is found.
    """
    from rich.console import Console

    from vllm_exl3.verify.display import Display
    from vllm_exl3.verify.run import Request, run

    if (text or compare or card) and against is None:
        raise typer.BadParameter("--text, --compare and --card need --against")
    if (compare or card) and text is None:
        raise typer.BadParameter("--compare and --card need --text")
    request = Request(pack, against, text, tokens, tuple(compare or ()), backends, canary, json_file, card)
    try:
        findings = run(request, Display(Console()))
    except KeyboardInterrupt:
        typer.echo("Interrupted: no file was written.", err=True)
        raise typer.Exit(130) from None
    if findings:
        raise typer.Exit(1)
