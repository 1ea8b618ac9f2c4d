"""``vllm-exl3 bench kv``: attention over long contexts with an int4 KV cache, beside vLLM's own kernels and fp8."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_exl3.cli.bench_output import BaselineOption, JsonOption, RoundsOption, finish, read_baseline

if TYPE_CHECKING:
    from vllm_exl3.serving.kv_bench import Caches, Shape

__all__ = ["kv"]

_CHUNK = 1024
_Row = tuple[str, str | None, Callable[[], tuple[float, float]]]
"""What is measured, the variable that selects it, and how."""


def kv(
    contexts: Annotated[str, typer.Option(help="Tokens in the cache, with commas between.")] = "32768,131072,262144",
    q_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 24,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 4,
    head_size: Annotated[int, typer.Option(min=8, help="Of keys and values.")] = 256,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 16,
    mtp: Annotated[
        int, typer.Option(min=0, max=7, help="Draft tokens: decoding has this many tokens more than one.")
    ] = 0,
    decode: Annotated[str, typer.Option(help="Cuts to time, such as 64,4,16:64,4,32, or auto.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 1,
    rounds: RoundsOption = 3,
    json_file: JsonOption = None,
    baseline_file: BaselineOption = None,
) -> None:
    """Time one layer's decoding and a prefill chunk of up to 1024 tokens, each with its error against float64."""
    import torch

    from vllm_exl3.attention.shape import parse_decode_shape

    try:
        lengths = [int(text) for text in contexts.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{contexts}: expected numbers with commas between", param_hint="--contexts") from None
    try:
        cuts = [(text, parse_decode_shape(text)) for text in decode.split(":")]
    except ValueError as error:
        raise typer.BadParameter(f"{decode}: {error}", param_hint="--decode") from None
    if min(lengths) < 1 + mtp:
        raise typer.BadParameter(f"{min(lengths)} tokens, fewer than are decoded", param_hint="--contexts")
    if q_heads % kv_heads or head_size % 8:
        raise typer.BadParameter(
            f"{q_heads} query and {kv_heads} KV heads of {head_size}: expected a multiple of the KV heads, and of 8"
        )
    baseline = read_baseline(baseline_file)
    if not torch.cuda.is_available():
        typer.echo("The int4 attention cannot be timed here: torch sees no CUDA GPU", err=True)
        raise typer.Exit(1)
    from vllm_exl3.cuda.timing import copy_bandwidth
    from vllm_exl3.serving.kv_bench import Caches, Shape

    layer = (q_heads, kv_heads, head_size, block_size)
    shapes = [Shape(length, batch, 1 + mtp, *layer) for length in lengths]
    caches = Caches(shapes)
    typer.echo(
        f"{torch.cuda.get_device_name()}, {copy_bandwidth() / 1e12:.2f} TB/s   µs a layer of {q_heads} query and "
        f"{kv_heads} KV heads of {head_size}; batch {batch}"
    )
    results: list[dict[str, Any]] = []
    for shape in shapes:
        limit = shape.nbytes(head_size + 8) / copy_bandwidth() * 1e6
        typer.echo(f"context {shape.context}: decoding {shape.query} token(s); int4's bytes take {limit:.1f} µs")
        rows: list[_Row] = [
            (f"int4, {text}", f"VLLM_EXL3_INT4_DECODE={text}", lambda cut=cut, shape=shape: caches.ours(shape, cut))  # type: ignore[misc]
            for text, cut in cuts
        ]
        cell = {
            "context": shape.context,
            "batch": batch,
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "head_size": head_size,
        }
        decoding = {"subject": "decode", **cell, "query": shape.query}
        results += [decoding | row for row in _table([*rows, *_others(caches, shape)], rounds)]
        chunk = Shape(shape.context, 1, min(_CHUNK, shape.context), *layer)
        typer.echo(f"context {shape.context}: prefill of its last {chunk.query} tokens")
        found = _table(
            [
                ("int4, FlashAttention", "VLLM_EXL3_INT4_FA_PREFILL=1", lambda: caches.ours(chunk)),  # noqa: B023
                ("int4, Triton", "VLLM_EXL3_INT4_FA_PREFILL=0", lambda: caches.ours(chunk, flash=False)),  # noqa: B023
                ("fp8, FlashAttention 3", None, lambda: caches.fp8_flash(chunk)),  # noqa: B023
            ],
            rounds,
        )
        results += [{"subject": "prefill", **cell, "query": chunk.query} | row for row in found]
    finish(results, json_file, baseline, gpu=True)


def _others(caches: "Caches", shape: "Shape") -> Iterator[_Row]:
    yield "int4, vLLM's own", "VLLM_EXL3_INT4_KV=0", lambda: caches.stock(shape)
    yield "fp8, FlashAttention 3", None, lambda: caches.fp8_flash(shape)
    yield "fp8, Triton", None, lambda: caches.fp8_triton(shape)


def _table(rows: list[_Row], rounds: int) -> list[dict[str, Any]]:
    """Print what can be measured, and which setting is fastest of those that a variable selects; returns rows."""
    from vllm_exl3.tools.compare import measured

    results: list[dict[str, Any]] = []
    best: tuple[float, str] | None = None
    for name, setting, run in rows:
        try:
            pairs = [run() for _ in range(rounds)]
        except Exception as fault:  # a backend that does not take the shape says so in many ways
            typer.echo(f"  {name:24s} not here: {type(fault).__name__}: {str(fault).splitlines()[0][:80]}")
            continue
        times, error = measured("us", (pair[0] for pair in pairs)), pairs[0][1]
        us = times["us"]
        results.append({"kernel": name, **times, "error": error})
        typer.echo(f"  {name:24s} {us:10.1f} µs   error {error:.1e}")
        if setting is not None and (best is None or us < best[0]):
            best = us, setting
    if best is not None:
        typer.echo(f"  use {best[1]}")
    return results
