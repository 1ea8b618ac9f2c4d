"""``vllm-exl3 bench``: how fast kernels and servers are on this machine. Here: linears, beside cuBLAS and the limit."""

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_exl3.cli.bench_kv import kv
from vllm_exl3.cli.bench_moe import moe
from vllm_exl3.cli.bench_output import BaselineOption, JsonOption, RoundsOption, finish, read_baseline
from vllm_exl3.cli.bench_serve import load, serve

if TYPE_CHECKING:
    from vllm_exl3.pack.stored import Codebook

__all__ = ["bench", "bit_rates", "code_of"]

bench = typer.Typer(
    help="Measure kernels on this machine's GPU, and servers and loading on any machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.callback()
def _bench() -> None:
    """Measure kernels on this machine's GPU, and servers and loading on any machine."""


bench.command(short_help="attention over long contexts, int4 KV cache against fp8")(kv)
bench.command(short_help="routed experts, against reading their weights")(moe)
bench.command(short_help="how long a server takes to load a pack")(load)
bench.command(short_help="tokens a second and memory of packs and other models")(serve)


@bench.command(short_help="linear layers, against cuBLAS and the limit")
def linear(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="in×out, repeatable. Default: 4096x4096, 4096x14336, 14336x4096."),
    ] = None,
    bits: Annotated[list[float] | None, typer.Option(help="Bits a weight, repeatable. Default: 4.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Tokens, repeatable. Default: 1, 4, 16, 64.")] = None,
    codebook: Annotated[str, typer.Option(help="mul1, mcg or 3inst.")] = "mul1",
    rounds: RoundsOption = 3,
    json_file: JsonOption = None,
    baseline_file: BaselineOption = None,
) -> None:
    """Time whole linears (transform, GEMM, Hadamards, cast) in replayed CUDA graphs over rotating weights."""
    import torch

    from vllm_exl3.cuda.backend import unavailable

    code = code_of(codebook)
    rates, counts = bit_rates(bits or [4.0], code), rows or [1, 4, 16, 64]
    if min(counts) < 1:
        raise typer.BadParameter(f"{min(counts)}: expected at least 1", param_hint="--rows")
    sizes = [_size(text) for text in shape or ["4096x4096", "4096x14336", "14336x4096"]]
    baseline = read_baseline(baseline_file)
    if (reason := unavailable()) is not None:
        typer.echo(f"The CUDA kernels cannot run here: {reason}", err=True)
        raise typer.Exit(1)
    from vllm_exl3.cuda.timing import cublas_us, limit_us, linear_us
    from vllm_exl3.tools.compare import measured

    typer.echo(
        f"{torch.cuda.get_device_name()}   µs a linear; limit: what reading, decoding or multiplying alone takes"
    )
    results = []
    for size, count in itertools.product(sizes, counts):
        text = f"{size[0]}x{size[1]}"
        identity = {"in": size[0], "out": size[1], "m": count}
        dense = measured("us", (cublas_us(size, count) for _ in range(rounds)))
        results.append({"kernel": "cublas_bf16", **identity, **dense})
        for rate in rates:
            cell = size, round(2 * rate), code, count
            times = measured("us", (linear_us(*cell) for _ in range(rounds)))
            limit = limit_us(*cell)
            row = {"kernel": "native", **identity, "bits": rate, "codebook": codebook, **times, "limit_us": limit}
            results.append(row)
            typer.echo(
                f"{text:>12s} {codebook} K={rate:<4g} M={count:<4d} {row['us']:8.2f}  "
                f"limit {limit:7.2f}  cuBLAS bf16 {dense['us']:8.2f}  {dense['us'] / row['us']:.2f}×"
            )
    finish(results, json_file, baseline, gpu=True)


def code_of(label: str) -> "Codebook":
    """The codebook of this name.

    Raises:
        BadParameter: there is none.
    """
    from vllm_exl3.pack.stored import Codebook

    code = next((book for book in Codebook if book.label == label), None)
    if code is None:
        labels = ", ".join(book.label for book in Codebook)
        raise typer.BadParameter(f"{label}: expected one of {labels}", param_hint="--codebook")
    return code


def bit_rates(rates: list[float], code: "Codebook") -> list[float]:
    """Bits a weight, as they were given.

    Raises:
        BadParameter: the codebook has none of that rate.
    """
    from vllm_exl3.pack.stored import HALF_BITS, Codebook

    if wrong := [rate for rate in rates if 2 * rate not in HALF_BITS or (rate % 1 and code != Codebook.MUL1)]:
        known = "1 to 8" + (" and 1.5, 2.5, 3.5" if code == Codebook.MUL1 else "")
        raise typer.BadParameter(f"{wrong[0]:g}: {code.label} has no such K, only {known}", param_hint="--bits")
    return rates


def _size(text: str) -> tuple[int, int]:
    """Input and output channels of ``in×out``, which EXL3 stores in blocks."""
    from vllm_exl3.pack.stored import BLOCK

    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise typer.BadParameter(f"{text}: expected in and out, such as 4096x14336", param_hint="--shape")
    size = int(width), int(height)
    if any(side < BLOCK or side % BLOCK for side in size):
        raise typer.BadParameter(f"{text}: expected multiples of {BLOCK}", param_hint="--shape")
    return size
