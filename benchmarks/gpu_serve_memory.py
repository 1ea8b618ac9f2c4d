"""GPU memory and load time of a served pack: what ``gpu_serve.py memory`` runs, and a test on the GPU."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_exl3.cuda import runtime
from vllm_exl3.pack import Pack

__all__ = ["measure_memory"]

_STAGES = ("load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
"""Of vLLM's worker, in the order in which an engine starts."""


def measure_memory(load: Callable[..., Any], folder: Path, use: Callable[[Any], object]) -> tuple[Any, dict[str, Any]]:
    """Serve a pack, and note what stays allocated after each stage of the start and after requests.

    Args:
        load: makes an engine of a folder.
        folder: the pack.
        use: sends requests to the engine.

    Returns:
        The engine and a row: ``packed_bytes`` of the files, ``model_bytes`` allocated by loading, ``kv_bytes``,
        ``other_bytes`` that stayed allocated otherwise (vLLM's buffers and all scratch); seconds of loading weights,
        and of all of vLLM's ``load_model`` but making kernels ready, ``compile_s``; and ``read_s`` for copying the
        same tensors to the GPU with safetensors alone.
    """
    with _watched() as (seconds, grown):
        llm = load(folder)
    before = _allocated()
    use(llm)
    requests = _allocated() - before
    packed = Pack.open(folder).nbytes
    read = _read_seconds(folder)
    return llm, {
        "kernel": "native",
        "subject": "memory",
        "pack": folder.name,
        "packed_bytes": packed,
        "model_bytes": grown["load_model"],
        "model_over_packed": grown["load_model"] / packed,
        "kv_bytes": grown["initialize_from_config"],
        "other_bytes": grown["determine_available_memory"] + grown["compile_or_warm_up_model"] + requests,
        "weights_s": seconds["load_weights"],
        "load_model_s": seconds["load_model"] - seconds["prepare"],
        "compile_s": seconds["prepare"],
        "read_s": read,
        "weights_over_read": seconds["load_weights"] / read,
    }


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@contextmanager
def _watched() -> Iterator[tuple[dict[str, float], dict[str, int]]]:
    """Time the stages of an engine's start in this process, and what each leaves allocated on the GPU."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.v1.worker.gpu_worker import Worker

    places: list[tuple[Any, str]] = [(Worker, name) for name in _STAGES]
    places += [(DefaultModelLoader, "load_weights"), (runtime.Device, "prepare")]
    originals = [getattr(holder, name) for holder, name in places]
    seconds = {name: 0.0 for _, name in places}
    grown = {name: 0 for _, name in places}

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, begin = _allocated(), time.perf_counter()
            result = original(*args, **kwargs)
            torch.cuda.synchronize()
            seconds[name] += time.perf_counter() - begin
            grown[name] += _allocated() - before
            return result

        return call

    try:
        for (holder, name), original in zip(places, originals, strict=True):
            setattr(holder, name, watch(name, original))
        yield seconds, grown
    finally:
        for (holder, name), original in zip(places, originals, strict=True):
            setattr(holder, name, original)


def _read_seconds(folder: Path) -> float:
    """Seconds for the plainest way of bringing a pack's tensors to the GPU, the best of two: the files are cached."""
    from safetensors import safe_open

    def once(files: Sequence[Path]) -> float:
        begin = time.perf_counter()
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name).cuda()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    files = sorted(folder.glob("*.safetensors"))
    return min(once(files) for _ in range(2))
