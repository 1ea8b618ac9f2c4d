"""The linears of a model that VLLM_EXL3_PRECISION=fast serves, in words: for the report of an engine's start."""

from collections import Counter
from collections.abc import Callable, Iterable

from vllm_exl3.cuda import dispatch, gemm, gemm_plan, prefill_int8
from vllm_exl3.cuda.geometry import MAX_SHARDS, GpuLimits
from vllm_exl3.ops.shards import Shard, cached_shards

__all__ = ["summary"]


def summary(layers: Iterable[tuple[int, ...]], limits: GpuLimits | None = None) -> list[str]:
    """One line for each kind of input that fast arithmetic may serve.

    Args:
        layers: each linear's shards, as `ops.shards.pack_shards` makes them.
        limits: the GPU; the current one when None.
    """
    limits, every = limits or _current(), [cached_shards(tuple(layer)) for layer in layers]
    from_rows, to_rows = dispatch.crossover(limits.architecture).mul1 + 1, dispatch.FAST_TOKENS
    return [
        _line(f"from {prefill_int8.LEAST_ROWS} tokens on", every, lambda group: prefill_int8.refusal(group, limits)),
        _line(f"for {_least_rows(every, limits)} to {prefill_int8.LEAST_ROWS - 1} tokens", every, _few(limits)),
        _line(f"for {from_rows} to {to_rows} tokens", every, prefill_int8.weights_refusal),
    ]


def _few(limits: GpuLimits) -> Callable[[tuple[Shard, ...]], str | None]:
    """Why the GEMM of up to 128 tokens does not serve shards with int8, or None."""

    def refusal(group: tuple[Shard, ...]) -> str | None:
        if (reason := prefill_int8.weights_refusal(group) or gemm_plan.refusal(group, limits, int8=True)) is not None:
            return reason
        return None if gemm.served_rows(group, limits, int8=True) else "the layer is too small to gain"

    return refusal


def _least_rows(layers: list[tuple[Shard, ...]], limits: GpuLimits) -> int:
    """The fewest tokens that the GEMM serves of any of the layers with int8, or of a large one."""
    found = [gemm.served_rows(shards[:MAX_SHARDS], limits, int8=True) for shards in layers]
    return min((rows.start for rows in found if rows), default=dispatch.FAST_TOKENS + 1)


def _current() -> GpuLimits:
    import torch

    from vllm_exl3.cuda import runtime

    return runtime.device(torch.cuda.current_device()).limits


def _line(tokens: str, layers: list[tuple[Shard, ...]], refusal: Callable[[tuple[Shard, ...]], str | None]) -> str:
    served, refused = 0, Counter[str]()
    for shards in layers:
        groups = [shards[start : start + MAX_SHARDS] for start in range(0, len(shards), MAX_SHARDS)]
        reasons = [reason for group in groups if (reason := refusal(group)) is not None]
        if reasons:
            refused[reasons[0]] += 1
        else:
            served += 1
    line = f"fast, int8 {tokens}: {served} of {len(layers)} linears"
    others = "; ".join(f"{count} in default arithmetic: {reason}" for reason, count in refused.items())
    return f"{line}; {others}" if others else line
