"""Speed of an 8B-shaped model over one GPU or two: one engine's part of ``gpu_two.py``."""

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dense_8b import KINDS
from benchmarks.two_engines import load

__all__ = ["BATCHES", "PROMPTS", "speed"]

BATCHES = (1, 8, 32)
PROMPTS = (1, 4)
"""How many prompts of `PROMPT_LENGTH` tokens are answered together."""
PROMPT_LENGTH = 2048
_DECODED_AFTER = 128
_SHORT, _LONG = 16, 144
_REPEATS = 3


def speed(
    kind: str, ranks: int, pack: Path, out: Path, shape: dict[str, int], options: dict[str, Any], *, profile: bool
) -> None:
    """Start an engine, wait for one's turn, and measure.

    Args:
        kind: of `KINDS`.
        ranks: GPUs.
        pack: the model's folder; waited for.
        out: ``NAME.ready`` is made there when the engine is, ``NAME.go`` waited for, ``NAME.rows`` gets a line a row.
        shape: of the model.
        options: further options of the engine.
        profile: attribute the GPU's time to kernels, at last.
    """
    name = f"{kind}-{ranks}"
    while not (pack / "complete").exists():
        time.sleep(0.2)
    begin = time.perf_counter()
    llm = load(
        pack,
        **{
            "dtype": "bfloat16",
            "tensor_parallel_size": ranks,
            "enforce_eager": False,
            # graphs of the sizes measured only: capturing is what a start spends its time on
            "compilation_config": {"cudagraph_capture_sizes": list(BATCHES)},
            "max_model_len": PROMPT_LENGTH + 256,
            "max_num_batched_tokens": max(PROMPTS) * PROMPT_LENGTH,
            "max_num_seqs": max(BATCHES),
            "kv_cache_memory_bytes": 3 << 30,
            "gpu_memory_utilization": 0.2,
            **options,
        },
    )
    started = time.perf_counter() - begin
    identity = {"kernel": KINDS[kind], "ranks": ranks}
    states = llm.collective_rpc("probe_state")
    with (out / f"{name}.rows").open("w", encoding="utf-8", buffering=1) as rows:
        start = {"start_s": round(started, 1)}
        memory = {key: [state[key] for state in states] for key in ("weight_bytes", "allocated_bytes", "peak_bytes")}
        print(json.dumps({**identity, "subject": "start", **start, **memory}), file=rows)
        (out / f"{name}.ready").touch()
        while not (out / f"{name}.go").exists():
            time.sleep(0.1)
        measures = [_decode(llm, shape["vocab"]), _prefill(llm, shape["vocab"])]
        if profile:
            measures.append(_kernels(llm, shape["vocab"]))
        for row in itertools.chain(*measures):
            print(json.dumps({**identity, **row}), file=rows)
    (out / f"{name}.done").touch()


def _prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [[int(token) for token in generator.integers(0, vocabulary, length)] for _ in range(count)]


def _seconds(llm: Any, prompts: list[list[int]], tokens: int) -> float:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    return time.perf_counter() - begin


def _decode(llm: Any, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Seconds of a step from the difference between two output lengths."""
    for batch in BATCHES:
        prompts = _prompts(batch, _DECODED_AFTER, vocabulary)
        _seconds(llm, prompts, _SHORT)
        steps = [
            (_seconds(llm, prompts, _LONG) - _seconds(llm, prompts, _SHORT)) / (_LONG - _SHORT) for _ in range(_REPEATS)
        ]
        step = statistics.median(steps)
        spread = (max(steps) - min(steps)) * 1e6
        yield {
            "subject": "decode",
            "m": batch,
            "us": step * 1e6,
            "spread_us": spread,
            "tokens_per_second": batch / step,
        }


def _prefill(llm: Any, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Time to the first token of prompts that come together."""
    for count in PROMPTS:
        prompts = _prompts(count, PROMPT_LENGTH, vocabulary)
        _seconds(llm, prompts, 1)
        seconds = [_seconds(llm, prompts, 1) for _ in range(_REPEATS)]
        took = statistics.median(seconds)
        tokens = count * PROMPT_LENGTH
        yield {"subject": "prefill", "m": tokens, "us": took * 1e6, "tokens_per_second": tokens / took}


def _kernels(llm: Any, vocabulary: int) -> Iterator[dict[str, Any]]:
    """What a rank's GPU does while one sequence is decoded; all-reduces include waiting for the other rank."""
    prompts = _prompts(1, _DECODED_AFTER, vocabulary)
    llm.collective_rpc("probe_profile", args=(True,))
    _seconds(llm, prompts, _LONG)
    for rank, kernels in enumerate(llm.collective_rpc("probe_profile", args=(False,))):
        parts = {"exl3": 0.0, "all_reduce": 0.0, "other": 0.0}
        for name, us in kernels.items():
            reduces = "cross_device_reduce" in name or "nccl" in name.lower()
            parts["exl3" if name.startswith("exl3_") else "all_reduce" if reduces else "other"] += us / _LONG
        yield {"subject": "kernels", "m": 1, "rank": rank, **{f"{part}_us": us for part, us in parts.items()}}
