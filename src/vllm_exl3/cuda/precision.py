"""What VLLM_EXL3_PRECISION=fast serves of a model, in words: for the report of an engine's start."""

from collections import Counter
from collections.abc import Iterable

from vllm_exl3.cuda import prefill_int8
from vllm_exl3.cuda.geometry import MAX_SHARDS, GpuLimits
from vllm_exl3.ops.shards import Shard, cached_shards

__all__ = ["summary"]


def summary(layers: Iterable[tuple[int, ...]], limits: GpuLimits | None = None) -> list[str]:
    """One line for each kind of input that fast arithmetic may serve.

    Args:
        layers: each linear's shards, as `ops.shards.pack_shards` makes them.
        limits: the GPU; the current one when None.
    """
    return [_prompts([cached_shards(tuple(layer)) for layer in layers], limits or _current())]


def _current() -> GpuLimits:
    import torch

    from vllm_exl3.cuda import runtime

    return runtime.device(torch.cuda.current_device()).limits


def _prompts(layers: list[tuple[Shard, ...]], limits: GpuLimits) -> str:
    served, refused = 0, Counter[str]()
    for shards in layers:
        groups = [shards[start : start + MAX_SHARDS] for start in range(0, len(shards), MAX_SHARDS)]
        reasons = [reason for group in groups if (reason := prefill_int8.refusal(group, limits)) is not None]
        if reasons:
            refused[reasons[0]] += 1
        else:
            served += 1
    line = f"fast, int8 from {prefill_int8.LEAST_ROWS} tokens on: {served} of {len(layers)} linears"
    others = "; ".join(f"{count} in default arithmetic: {reason}" for reason, count in refused.items())
    return f"{line}; {others}" if others else line
