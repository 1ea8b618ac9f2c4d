"""Environment variables that are set and change nothing, since another one decides: named, not silently passed over."""

from collections.abc import Iterator
from typing import Any

from vllm_exl3 import env
from vllm_exl3.env_planning import ADAPTIVE_VERIFICATION
from vllm_exl3.env_variable import Variable

__all__ = ["unused"]

_DECODE_ROWS: tuple[Variable[Any], ...] = (env.NATIVE_MOE_MAX_ROWS, *env.NATIVE_MOE_MAX_ROWS_BY_BITS.values())
_PREFILL_CUTS: tuple[Variable[Any], ...] = (env.GROUPED_PREFILL_MAX_ROWS, env.FAT_THRESHOLD)
_NATIVE_EXPERTS: tuple[Variable[Any], ...] = (*_DECODE_ROWS, env.GROUPED_PREFILL, *_PREFILL_CUTS, env.FUSED_TEMP_ROWS)


def unused() -> list[str]:
    """A sentence for each variable that is set without effect.

    Raises:
        VariableError: a variable is set to something it does not take.
    """
    said = [
        f"{name}={text} has no effect: {variable.given()[0][0]}={variable.given()[0][1]}, another name of it, counts"
        for variable in env.VARIABLES
        for name, text in variable.given()[1:]
        if text != variable.given()[0][1]
    ]
    for variables, reason in _reasons():
        said += [f"{_shown(variable)} has no effect: {reason}" for variable in variables if _chosen(variable)]
    return said


def _reasons() -> Iterator[tuple[tuple[Variable[Any], ...], str]]:
    """Groups of variables that something else rules out, and what."""
    if (kernel := env.MOE_KERNEL.get()) in ("exllamav3", "reference"):
        yield _NATIVE_EXPERTS, f"{env.MOE_KERNEL.name}={kernel} leaves routed experts to other kernels"
    elif env.batch_invariant():
        paths = (*_DECODE_ROWS, env.FUSED_TEMP_ROWS)
        yield paths, "VLLM_BATCH_INVARIANT=1 leaves routed experts one path for any number of tokens"
    elif not env.GROUPED_PREFILL.get():
        paths = (*_DECODE_ROWS, *_PREFILL_CUTS)
        yield paths, f"{env.GROUPED_PREFILL.name}=0 leaves any number of tokens to the decode path"
    if (kernel := env.LINEAR_KERNEL.get()) != "reconstruct":
        yield (env.RECONSTRUCT_MB,), f"{env.LINEAR_KERNEL.name} is {kernel}, not reconstruct"
    if not env.INT4_KV.get():
        cuts = (env.INT4_DECODE, env.INT4_TILES, env.INT4_FA_PREFILL)
        yield cuts, f"{env.INT4_KV.name}=0 leaves the int4 KV cache to vLLM"
    yield (ADAPTIVE_VERIFICATION,), "vLLM has no hook that drops drafted tokens by their probability"
    if (place := env.NGRAM_TABLE.get()) != "disk":
        yield (env.NGRAM_CACHE_MIB,), f"{env.NGRAM_TABLE.name} is {place}, not disk"


def _chosen(variable: Variable[Any]) -> bool:
    """Whether it is set to something else than what it means unset."""
    given = variable.given()
    return bool(given) and given[0][1].lower() != variable.default


def _shown(variable: Variable[Any]) -> str:
    name, text = variable.given()[0]
    return f"{name}={text}"
