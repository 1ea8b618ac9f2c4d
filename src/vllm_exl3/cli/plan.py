"""``vllm-exl3 plan``: what serving a pack on given GPUs takes, how fast it may be, and the command. Headers only."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_exl3.pack.pack import Pack

__all__ = ["plan"]


def plan(
    pack: Annotated[str, typer.Argument(help="A folder, or a Hub repository such as owner/name.")],
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of each GPU, such as 24GiB; of unequal ones 24GiB,12GiB; otherwise that of --gpu."),
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory that weights may take, such as 128GiB.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks; otherwise all equal GPUs.")] = None,
    ep: Annotated[bool, typer.Option("--ep", help="Divide whole experts over the ranks.")] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context; otherwise what config.json allows.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, fp8 or int4_per_token_head.")] = "auto",
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Sequences at once; otherwise vLLM's default.")
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1.0, help="As vLLM takes it.")] = 0.92,
    gpu: Annotated[
        str | None, typer.Option(help="GPU model, such as 'RTX 4090', for speeds; or cpu, with --host-memory.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads, with --gpu cpu.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, such as 4.0bpw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say whether a pack fits on given GPUs, what is left for the KV cache, how fast it may be, and the command.

    Needs --gpu-memory, --gpu or both. The exit status is 1 when it does not fit. Speeds are estimates.
    """
    from vllm_exl3.cli.inspect import say_unused
    from vllm_exl3.pack.pack import Pack
    from vllm_exl3.plan.gpus import find_gpu, gpu_by_memory
    from vllm_exl3.plan.serving_plan import UTILIZATION, Wish, make_plan
    from vllm_exl3.plan.sizes import GIB, parse_gib, parse_gibs

    say_unused(pack, revision)
    on_cpu = gpu is not None and gpu.lower() == "cpu"
    gpus_only = {
        "--gpu-memory": gpu_memory is not None,
        "--gpus": gpus is not None,
        "--tp": tp is not None,
        "--ep": ep,
        "--kv-cache-dtype": kv_cache_dtype != "auto",
        "--max-num-seqs": max_num_seqs is not None,
        "--gpu-memory-utilization": gpu_memory_utilization != UTILIZATION,
    }
    _refuse_unused(gpus_only if on_cpu else {"--threads": threads is not None}, on_cpu)
    try:
        host = parse_gib(host_memory) if host_memory is not None else None
        model = find_gpu(gpu) if gpu is not None and not on_cpu else None
        if gpu_memory is not None:
            sizes = parse_gibs(gpu_memory)
        elif model is not None:
            sizes = (int(model.memory_gib * GIB),)
        elif on_cpu and host is not None:
            sizes = ()
        else:
            raise ValueError("give --gpu-memory or --gpu; with --gpu cpu, --host-memory")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = Pack.open(pack, revision)
    if on_cpu:
        assert host is not None
        _print_cpu(opened, host, threads, max_model_len, as_json)
        return
    count = gpus or max(len(sizes), tp or 1)
    if len(sizes) not in (1, count):
        raise typer.BadParameter(f"--gpu-memory names {len(sizes)} GPUs, --gpus {count}")
    try:
        wish = Wish(
            model or gpu_by_memory(min(sizes) / GIB), sizes, gpus=count, tensor_parallel=tp, whole_experts=ep,
            host_bytes=host, length=max_model_len, cache_type=kv_cache_dtype, seqs=max_num_seqs,
            utilization=gpu_memory_utilization,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    made = make_plan(opened, wish)
    if as_json:
        import json

        from vllm_exl3.plan.as_data import plan_as_data

        typer.echo(json.dumps(plan_as_data(opened, made, revision) | {"gpu_assumed": model is None}, indent=2))
    else:
        from vllm_exl3.cli.plan_text import print_plan

        print_plan(opened, made, revision, assumed=model is None)
    if not made.fits:
        raise typer.Exit(1)


def _refuse_unused(given: dict[str, bool], on_cpu: bool) -> None:
    """Refuse options that this kind of plan does not take.

    Args:
        given: by option, whether it was given.
        on_cpu: whether the plan is of a CPU.
    """
    if unused := [option for option, present in given.items() if present]:
        reason = "with --gpu cpu" if on_cpu else "without --gpu cpu"
        raise typer.BadParameter(f"{unused[0]} has no effect {reason}: leave it out", param_hint=unused[0])


def _print_cpu(pack: "Pack", host: int, threads: int | None, length: int | None, as_json: bool) -> None:
    """The same for a CPU."""
    import json
    from dataclasses import asdict

    from vllm_exl3.cli.plan_text import print_cpu_plan
    from vllm_exl3.plan.cpu_plan import make_cpu_plan

    try:
        made = make_cpu_plan(pack, host, threads=threads, length=length)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        command = made.command(pack.source) if made.fits else None
        typer.echo(json.dumps({"source": pack.source, "gpu": "cpu", **asdict(made), "command": command}, indent=2))
    else:
        print_cpu_plan(pack, made)
    if not made.fits:
        raise typer.Exit(1)
