"""``vllm-exl3 demo``: a real language model, quantized here, served by stock vLLM and asked two questions."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_exl3.env import user_cache

__all__ = ["demo"]

RESULTS = Path("benchmarks/results/cpu/demo.json")
"""Where a checkout keeps recorded results, relative to its root."""


def demo(
    gguf: Annotated[Path | None, typer.Option(help="The source model, where pip cannot download it.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps model and pack between runs.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve on this port if it is free, else on any.")
    ] = None,
    baseline: Annotated[Path, typer.Option(help="File of recorded results to compare with.")] = RESULTS,
    record: Annotated[bool, typer.Option("--record", help="Write this run's results to that file.")] = False,
) -> None:
    """Quantize SmolLM2-135M-Instruct to 4-bit EXL3, serve it with vLLM, ask it two questions.

    Then compare the served pack with the 16-bit model. The first run downloads 93 MB and quantizes; later
    runs take the pack from the cache. The exit status is 1 when an answer or the comparison is wrong.
    """
    from rich.console import Console

    try:
        from vllm_exl3.demo.baseline import BaselineError
        from vllm_exl3.demo.run import Settings, run_demo
        from vllm_exl3.demo.server import ServerError
        from vllm_exl3.demo.source import SourceError
    except ModuleNotFoundError as error:
        typer.echo(f"The demo needs {error.name}: pip install 'vllm-exl3[demo]' beside vLLM.", err=True)
        raise typer.Exit(1) from None

    console = Console()
    settings = Settings(cache or default_cache(), gguf, port, baseline, record)
    settings.cache.mkdir(parents=True, exist_ok=True)
    try:
        failures = run_demo(settings, console)
    except (BaselineError, ServerError, SourceError) as error:
        failures = [str(error)]
    except KeyboardInterrupt:
        failures = ["interrupted; nothing keeps running, and the next run goes on with what is quantized"]
    for failure in failures:
        typer.echo(f"  failed     {failure}", err=True)
    if failures:
        raise typer.Exit(1)
    typer.echo("  passed")


def default_cache() -> Path:
    """``vllm_exl3/demo`` in the user's cache folder."""
    return user_cache() / "demo"
