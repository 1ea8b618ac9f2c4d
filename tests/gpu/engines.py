"""Engines of small packs on a GPU that is shared with others."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM

from benchmarks.engine_start import inspect_models_here, leave_out_top_k
from tests.serving.engine import PROMPTS, engine, generate

__all__ = ["DENSE", "MOE", "ROW_CODED", "plain_tokens", "serving", "tokens"]

PACKS = Path(__file__).parents[1] / "data" / "packs"
DENSE, MOE = PACKS / "llama_odd-4.0-mul1", PACKS / "qwen3_moe-3.0-mul1"
ROW_CODED = PACKS / "qwen3-2.25-mul1-emb4"


@contextmanager
def serving(pack: Path, **options: Any) -> Iterator[LLM]:
    """An engine with a cache of a given size, so that others on the GPU do not disturb vLLM's measuring."""
    leave_out_top_k()
    inspect_models_here()
    defaults: dict[str, Any] = {"dtype": "float16", "gpu_memory_utilization": 0.05}
    defaults |= {"kv_cache_memory_bytes": 256 << 20, "num_gpu_blocks_override": None}
    with engine(pack, **{**defaults, **options}) as llm:
        yield llm


@functools.cache
def plain_tokens(pack: Path) -> list[list[int]]:
    """Those of an engine without options, which a process starts once for each pack; not to be changed."""
    return tokens(pack)


def tokens(pack: Path, **options: Any) -> list[list[int]]:
    """Greedy continuations of `PROMPTS` by an engine of its own."""
    with serving(pack, **options) as llm:
        return generate(llm, PROMPTS)
