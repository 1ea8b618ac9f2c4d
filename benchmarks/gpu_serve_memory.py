"""GPU memory of a served pack: what ``gpu_serve.py memory`` runs, and a test on the GPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_exl3.pack import Pack

__all__ = ["measure_memory", "measure_start"]

_STAGES = ("load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
"""Of vLLM's worker, in the order in which an engine starts."""


def measure_memory(load: Callable[..., Any], folder: Path, use: Callable[[Any], object]) -> tuple[Any, dict[str, Any]]:
    """Serve a pack, and note what stays allocated after each stage of the start and after requests.

    Args:
        load: makes an engine of a folder.
        folder: the pack.
        use: sends requests to the engine.

    Returns:
        The engine and a row: ``packed_bytes`` of the files, ``model_bytes`` allocated by loading, ``kv_bytes``, and
        ``other_bytes`` that stayed allocated otherwise (vLLM's buffers and all scratch).
    """
    with _watched() as grown:
        llm = load(folder)
    before = _allocated()
    use(llm)
    requests = _allocated() - before
    packed = Pack.open(folder).nbytes
    return llm, {
        "kernel": "native",
        "subject": "memory",
        "pack": folder.name,
        "packed_bytes": packed,
        "model_bytes": grown["load_model"],
        "model_over_packed": grown["load_model"] / packed,
        "kv_bytes": grown["initialize_from_config"],
        "other_bytes": grown["determine_available_memory"] + grown["compile_or_warm_up_model"] + requests,
    }


def measure_start(load: Callable[[], Any]) -> dict[str, int]:
    """Start an engine that profiles memory itself, and note what it took.

    Args:
        load: makes the engine in this process.

    Returns:
        ``model_bytes`` allocated by loading, ``kv_bytes`` that vLLM found to be left for the cache, and ``kv_tokens``
        that it says the cache holds.
    """
    from vllm.v1.worker.gpu_worker import Worker

    original, left = Worker.determine_available_memory, [0]

    def determine(self: Any) -> int:
        left[0] = int(original(self))
        return left[0]

    Worker.determine_available_memory = determine  # type: ignore[method-assign]
    try:
        with _watched() as grown:
            llm = load()
    finally:
        Worker.determine_available_memory = original  # type: ignore[method-assign]
    cache = llm.llm_engine.vllm_config.cache_config
    tokens = getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size
    return {"model_bytes": grown["load_model"], "kv_bytes": left[0], "kv_tokens": int(tokens)}


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@contextmanager
def _watched() -> Iterator[dict[str, int]]:
    """What each stage of an engine's start in this process leaves allocated on the GPU."""
    from vllm.v1.worker.gpu_worker import Worker

    originals = {name: getattr(Worker, name) for name in _STAGES}
    grown = dict.fromkeys(_STAGES, 0)

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = _allocated()
            result = original(*args, **kwargs)
            grown[name] += _allocated() - before
            return result

        return call

    try:
        for name, original in originals.items():
            setattr(Worker, name, watch(name, original))
        yield grown
    finally:
        for name, original in originals.items():
            setattr(Worker, name, original)
