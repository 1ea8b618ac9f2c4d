"""``vllm-exl3 precompile``: fills the kernel cache ahead of time, with or without a GPU."""

from typing import Annotated

import typer

from vllm_exl3.cli.inspect import say_unused

__all__ = ["precompile"]


def precompile(
    pack: Annotated[str | None, typer.Argument(help="A folder or Hub repository: compile only what it needs.")] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="GPU architecture, such as sm_90a for an H100 or H200; repeatable. Default: the GPUs here."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the pack.")] = None,
    int4_kv: Annotated[
        bool, typer.Option("--int4-kv", help="Also compile the kernels that decode over an int4 KV cache.")
    ] = False,
) -> None:
    """Compile the GPU kernels into the cache, so that no start of the server has to.

    Without a pack, every bit rate and codebook is compiled, for linears and for routed experts; layers that mix bit
    rates then get their kernels at their first load. With VLLM_EXL3_PRECISION=fast in the environment, the kernels of
    fast mode are compiled, too. No GPU is needed where --arch names the architectures; copy the cache then, which is
    VLLM_EXL3_CACHE or vllm_exl3 in the user's cache folder.
    """
    import time

    from vllm_exl3.attention import native_cut
    from vllm_exl3.cuda.cache import CubinCache
    from vllm_exl3.cuda.compiler import compiler_unavailable
    from vllm_exl3.cuda.embedding import every_instance, pack_instances
    from vllm_exl3.cuda.moe_survey import expert_codes, expert_instances
    from vllm_exl3.cuda.runtime import build, cache_folder, own_instances
    from vllm_exl3.cuda.survey import every_kind, instances_for, local_gpus, pack_codes, typical_limits
    from vllm_exl3.pack.pack import Pack

    if pack is None and revision is not None:
        raise typer.BadParameter(f"{revision}: of which pack? Name it before the options", param_hint="--revision")
    if (reason := compiler_unavailable()) is not None:
        typer.echo(f"Nothing can be compiled here: {reason}", err=True)
        raise typer.Exit(1)
    try:
        gpus = [typical_limits(name) for name in arch] if arch else local_gpus()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from None
    if not gpus:
        typer.echo("No CUDA GPU here: name the architecture with --arch, such as --arch sm_90a", err=True)
        raise typer.Exit(1)
    cache = CubinCache(cache_folder())
    if (reason := cache.refusal()) is not None:
        typer.echo(f"Nothing can be kept: {reason}", err=True)
        raise typer.Exit(1)
    if pack is None:
        linears = experts = [(kind,) for kind in every_kind()]
        rows = list(every_instance())
    else:
        say_unused(pack, revision)
        opened = Pack.open(pack, revision)
        linears, experts, rows = pack_codes(opened), expert_codes(opened), pack_instances(opened)
    for limits in gpus:
        started = time.perf_counter()
        wanted = [*own_instances(limits), *instances_for(linears, limits), *expert_instances(experts, limits), *rows]
        wanted += native_cut.every_instance(limits.shared_memory) if int4_kv else []
        wanted = list(dict.fromkeys(wanted))
        try:
            build(wanted, limits.architecture, cache, say=typer.echo)
        except KeyboardInterrupt:
            typer.echo(
                f"Interrupted: kernels that were ready are kept in {cache.folder}; run it again for the rest", err=True
            )
            raise typer.Exit(130) from None
        seconds = time.perf_counter() - started
        if cache.unkept:
            typer.echo(
                f"{limits.architecture}: {cache.unkept} of {len(wanted)} kernels could not be kept in {cache.folder}, "
                "for the reason above: mend that, or set VLLM_EXL3_CACHE to another folder",
                err=True,
            )
            raise typer.Exit(1)
        typer.echo(f"{limits.architecture}: {len(wanted)} kernels ready in {cache.folder} after {seconds:.1f} s")
