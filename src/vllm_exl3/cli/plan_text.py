"""Renders a plan for a terminal."""

import typer

from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.wording import byte_size, counted
from vllm_exl3.plan.advice import advice, shell
from vllm_exl3.plan.as_data import estimate_note
from vllm_exl3.plan.cpu_plan import CpuPlan
from vllm_exl3.plan.estimate import rates
from vllm_exl3.plan.serving_plan import Plan, Rank

__all__ = ["print_cpu_plan", "print_plan"]


def print_plan(pack: Pack, plan: Plan, revision: str | None = None, *, assumed: bool = False) -> None:
    """Print everything that a plan found.

    Args:
        pack: the pack.
        plan: its plan.
        revision: the revision that was given, for the command.
        assumed: the GPU model stands in for an unnamed one of this memory, so that speeds are of a model that the
            user may not have.
    """
    wish = plan.wish
    model = f"{wish.gpu.name}, assumed: name yours with --gpu" if assumed else wish.gpu.name
    said = f"{counted(wish.gpus, 'GPU')} ({model}), contexts of {plan.length:,} tokens"
    typer.echo(f"{pack.source} on {said}")
    if plan.blocker is not None:
        typer.echo(f"does not work: {plan.blocker}")
    for number, rank in enumerate(plan.ranks):
        _print_rank(rank, f"stage {number}, each rank" if wish.stages > 1 else "each GPU" if wish.gpus > 1 else "GPU")
    for name, capacity in plan.capacity.items():
        if capacity is None:
            continue
        here = " (planned)" if name == wish.cache_type else ""
        typer.echo(
            f"  KV cache   {name}: {capacity.tokens:,} tokens, {capacity.requests:.1f} requests of full length{here}"
        )
    for name, reason in plan.unsupported.items():
        typer.echo(f"  KV cache   {name}: not for this model, {reason}")
    for sentence in plan.unknown:
        typer.echo(f"  KV cache   no number of tokens: {sentence}")
    if plan.fits:
        _print_speed(plan)
        typer.echo(f"\n{shell(pack, plan, revision)}")
        return
    typer.echo("\nDoes not fit. What to change:")
    for line in list(advice(pack, plan)) or ["nothing known here helps: take a smaller model"]:
        typer.echo(f"  {line}")


def _print_rank(rank: Rank, what: str) -> None:
    tiers = rank.placement
    spent = sum(rank.workspace.values())
    typer.echo(f"  {what}: {byte_size(rank.budget)} for vLLM, {counted(rank.layers, 'layer')}")
    weights = f"  weights    {byte_size(tiers.gpu)} on the GPU"
    if tiers.host:
        weights += f", {byte_size(tiers.host)} in host memory ({byte_size(tiers.pinned)} pinned)"
    if tiers.short:
        weights += f"; {byte_size(tiers.short)} without a place"
    typer.echo(weights)
    parts = ", ".join(f"{name} {byte_size(size)}" for name, size in rank.workspace.items() if size >= 1 << 20)
    typer.echo(f"  workspace  {byte_size(spent)} ({parts})")
    typer.echo(f"  KV cache   {byte_size(rank.cache_bytes)}")


def _print_speed(plan: Plan) -> None:
    decode = ", ".join(f"{speed:,.0f} with {counted(batch, 'sequence')}" for batch, speed in plan.decode.items())
    typer.echo(f"  decode     tokens/s: {decode}; {plan.decode_full:,.0f} at the end of a full context")
    prompts = ", ".join(f"{speed:,.0f} with {tokens:,} tokens" for tokens, speed in plan.prefill.items())
    if prompts:
        typer.echo(f"  prompt     tokens/s: {prompts}")
    typer.echo(f"  speeds     {estimate_note(plan)}; sources: {', '.join(rates()['sources'])}")


def print_cpu_plan(pack: Pack, plan: CpuPlan) -> None:
    """Print the plan of a CPU."""
    typer.echo(f"{pack.source} on a CPU, contexts of {plan.length:,} tokens")
    typer.echo(f"  weights    {byte_size(plan.weights)}")
    tokens = f", {plan.capacity.tokens:,} tokens" if plan.capacity is not None else ""
    typer.echo(f"  KV cache   {plan.cache_gib} GiB{tokens}")
    for sentence in plan.unknown:
        typer.echo(f"  KV cache   no number of tokens: {sentence}")
    if not plan.fits:
        typer.echo("\nDoes not fit: give a shorter --max-model-len, more memory, or a pack with fewer bits.")
        return
    measured = rates()["cpu"]
    speed = f"about {plan.tokens_per_second:.1f} tokens/s with {plan.threads} threads"
    source = f"linears on {measured['threads']} threads of an {measured['cpu']}"
    typer.echo(f"  decode     {speed}; estimated from {source} (benchmarks/results/cpu/cpu_linear.json)")
    typer.echo(f"\n{plan.command(pack.source)}")
