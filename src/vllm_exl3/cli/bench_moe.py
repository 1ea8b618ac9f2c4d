"""``vllm-exl3 bench moe``: how fast whole blocks of routed experts are on this machine's GPU, beside the limit."""

from typing import Annotated

import typer

from vllm_exl3.cli.bench_output import BaselineOption, JsonOption, RoundsOption, finish, read_baseline

__all__ = ["moe"]


def moe(
    experts: Annotated[int, typer.Option(min=1, help="Experts of the layer.")] = 128,
    top_k: Annotated[int, typer.Option(min=1, help="Experts that a token visits.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="Channels that enter and leave.")] = 2048,
    intermediate: Annotated[int, typer.Option(min=1, help="Channels between the projections.")] = 768,
    bits: Annotated[
        list[float] | None, typer.Option(help="Bits a weight; several mix in one layer. Default: 4.")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Tokens, repeatable. Default: 1, 8, 64, 512, 4096.")] = None,
    codebook: Annotated[str, typer.Option(help="mul1, mcg or 3inst.")] = "mul1",
    rounds: RoundsOption = 3,
    json_file: JsonOption = None,
    baseline_file: BaselineOption = None,
) -> None:
    """Time whole blocks (sorting, transforms, both products, SwiGLU, weighted sum) in replayed CUDA graphs over uniform
    routings.
    """
    import torch

    from vllm_exl3.cli.bench import bit_rates, code_of
    from vllm_exl3.cuda.backend import unavailable

    code = code_of(codebook)
    rates, counts = bit_rates(bits or [4.0], code), rows or [1, 8, 64, 512, 4096]
    if min(counts) < 1:
        raise typer.BadParameter(f"{min(counts)}: expected at least 1", param_hint="--rows")
    if top_k > experts:
        raise typer.BadParameter(f"{top_k} of {experts} experts", param_hint="--top-k")
    baseline = read_baseline(baseline_file)
    if (reason := unavailable()) is not None:
        typer.echo(f"The CUDA kernels cannot run here: {reason}", err=True)
        raise typer.Exit(1)
    from vllm_exl3.cuda.moe_timing import ExpertShape, random_experts
    from vllm_exl3.tools.compare import measured

    shape = ExpertShape(experts, top_k, hidden, intermediate)
    layer = random_experts(shape, [(rate, int(code)) for rate in rates])
    try:
        layer.prepare()
    except ValueError as error:
        typer.echo(f"These experts cannot be timed here: {error}", err=True)
        raise typer.Exit(1) from None
    kinds = ", ".join(f"{rate:g}" for rate in rates)
    typer.echo(
        f"{torch.cuda.get_device_name()}   µs a block of {experts} experts, top {top_k}, {hidden}×{intermediate}, "
        f"{codebook} K={kinds}; limit: what reading, decoding or multiplying alone takes"
    )
    results = []
    for count in counts:
        times = measured("us", (layer.us(count) for _ in range(rounds)))
        us, limit = times["us"], layer.limit_us(count)
        rate = 6e-6 * count * top_k * hidden * intermediate / us
        identity = {"experts": experts, "top_k": top_k, "in": hidden, "out": intermediate, "m": count, "bits": rates}
        row = {
            "kernel": "native",
            **identity,
            "codebook": codebook,
            **times,
            "limit_us": limit,
            "tflops": round(rate, 2),
        }
        results.append(row)
        typer.echo(f"M={count:<5d} {us:9.1f}  limit {limit:8.1f}  {rate:6.1f} TFLOP/s")
    finish(results, json_file, baseline, gpu=True)
