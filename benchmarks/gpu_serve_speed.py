"""Tokens per second and time to first token of an 8B-shaped model through vLLM: what ``gpu_serve.py speed`` runs.

Engines of several kinds start side by side on one GPU, since starting takes minutes, and measure one after another.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.dense_8b import KINDS, SHAPE, is_exl3, options_of, write_bf16_config
from vllm_exl3.tools.random_pack import write_random_pack

__all__ = ["KINDS", "LENGTHS", "ROW", "SHAPE", "Row", "speed", "take_turns"]

Row = dict[str, Any]

ROW = "ROW "
"""Begins the lines that hold results."""
READY = "READY"
"""What an engine's process says when it could begin."""

LENGTHS = (128, 1024, 8192)
"""Lengths whose time to first token is measured."""
PROMPT = 128
SHORT, LONG = 16, 144
_GEMM = ("gemm", "gemv", "nvjet", "cutlass", "splitk", "marlin", "scaled_mm")
"""In the names of kernels of cuBLAS, CUTLASS and Marlin."""

_PARTS = {"attention": ("flash",), "compiled": ("triton_",)}
"""Words in the names of kernels, by what they belong to: vLLM's attention with its cache writes, and what Inductor
makes: norms, rotary embeddings, activations."""

IDLE = "no kernel"
"""What stands in a kernel's place for the time between kernels."""

Load = Callable[..., Any]


def take_turns(kinds: list[str], batches: list[int]) -> Iterator[Row]:
    """Start an engine a kind in processes of their own at once; each measures when all are ready and it is its turn."""
    script = str(Path(__file__).with_name("gpu_serve.py"))
    options = ["--wait", "--batches", *map(str, batches)]
    # vLLM's log leaves by stderr, so that stdout holds rows and never fills up unread
    environment = {**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    fast = {"VLLM_EXL3_PRECISION": "fast"}
    jobs = {
        kind: subprocess.Popen(
            [sys.executable, script, "speed", kind, *options],
            text=True,
            env=environment | (fast if kind == "exl3_fast" else {}),
            **pipes,
        )
        for kind in kinds
    }
    ready = {kind: any(line.strip() == READY for line in job.stdout) for kind, job in jobs.items()}
    for kind, job in jobs.items():
        if ready[kind]:
            job.stdin.write("go\n")
            job.stdin.flush()
            yield from (json.loads(line.removeprefix(ROW)) for line in job.stdout if line.startswith(ROW))
    failed = [kind for kind, job in jobs.items() if job.wait() or not ready[kind]]
    if failed:
        raise SystemExit(f"no or not all results of {', '.join(failed)}: the log of its process is above")


def speed(load: Load, kind: str, batches: list[int], *, wait: bool) -> Iterator[Row]:
    """Decode an 8B-shaped model at several batch sizes, then answer prompts of several lengths.

    Args:
        load: makes an engine of a folder and vLLM's options.
        kind: of `KINDS`.
        batches: sequences decoded together.
        wait: say `READY` when the engine is, and begin when a line comes in.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / kind
        with ProcessPoolExecutor(1) as pool:  # writing 5 GB takes as long as importing vLLM
            pack = {**SHAPE, "bits": 4, "head_bits": 6}
            written = pool.submit(write_random_pack, folder, **pack) if is_exl3(kind) else None
            from tests.serving.engine import model_of

            write_bf16_config(folder, SHAPE, kind) if written is None else written.result()
        options: dict[str, Any] = {
            "dtype": "float16" if kind == "int4" else "bfloat16",
            "max_num_seqs": max(*batches, 32),
            "max_model_len": max(LENGTHS) + 256,
            "max_num_batched_tokens": max(LENGTHS),
            "hf_overrides": {"max_position_embeddings": 2 * max(LENGTHS)},
            "kv_cache_memory_bytes": 9 << 30,
            "gpu_memory_utilization": 0.15,
            # of the sizes measured only: capturing takes its time; vLLM's own list ends between 64 and 512
            "compilation_config": {"cudagraph_capture_sizes": sorted({*batches, PROMPT})},
        }
        llm = load(folder, **options_of(kind), **options)
        weights = sum(parameter.nbytes for parameter in model_of(llm).parameters())
        if wait:
            print(READY, flush=True)
            sys.stdin.readline()
        for batch in batches:
            yield _decode(llm, kind, batch) | {"weight_bytes": weights}
        for length in LENGTHS:
            yield _first_token(llm, kind, length)


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy continuations."""
    from tests.serving import engine  # imports vLLM, which the process that starts the others does without

    return engine.generate(llm, prompts, tokens)


def _random_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(0, SHAPE["vocab"], length)] for _ in range(count)]


def _decode(llm: Any, kind: str, batch: int) -> Row:
    """Time one batch size, and attribute the GPU's time to kernels."""
    prompts = _random_prompts(batch, PROMPT)
    generate(llm, prompts, SHORT)
    steps = []
    for _ in range(3):
        elapsed = []
        for length in (SHORT, LONG):
            begin = time.perf_counter()
            generate(llm, prompts, length)
            elapsed.append(time.perf_counter() - begin)
        steps.append((elapsed[1] - elapsed[0]) / (LONG - SHORT))
    step = statistics.median(steps)
    kernels = _kernels_of_a_step(llm, prompts)
    parts = _parts(kernels, kind)
    for name, us in sorted(kernels.items(), key=lambda item: -item[1])[:8]:
        print(f"  {kind} {batch}: {us:8.1f} us {name[:90]}", file=sys.stderr)
    return {
        "kernel": KINDS[kind],
        "subject": "decode",
        "m": batch,
        "us": step * 1e6,
        "tokens_per_second": batch / step,
        "linear_us": parts["linears"],
        "kernels_us": sum(kernels.values()),
        "exl3_share_of_gpu_time": parts["linears"] / sum(kernels.values()) if is_exl3(kind) else 0.0,
        "parts_us": parts,
    }


def _parts(kernels: dict[str, float], kind: str) -> dict[str, float]:
    """Microseconds of a step's kernels by what they belong to."""
    found = dict.fromkeys(("linears", *_PARTS, "rest"), 0.0)
    for name, us in kernels.items():
        named = (part for part, words in _PARTS.items() if any(word in name for word in words))
        found["linears" if _is_linear(name, kind) else next(named, "rest")] += us
    return found


def _is_linear(name: str, kind: str) -> bool:
    if is_exl3(kind):
        return name.startswith("exl3_")
    return any(word in name.lower() for word in _GEMM) and "flash" not in name.lower()


def _kernels_of_a_step(llm: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Microseconds by which each kernel lengthens a decoding step: the difference of two lengths, as in the timing."""
    totals = []
    for length in (SHORT, 3 * SHORT):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            generate(llm, prompts, length)
        totals.append(_added_us(profile))
    return {name: (us - totals[0].get(name, 0.0)) / (2 * SHORT) for name, us in totals[1].items()}


def _added_us(profile: Any) -> dict[str, float]:
    """Microseconds from the end of the kernels before each kernel to its own end, by name, and of no kernel at all.

    A kernel that starts before its predecessor ends, and waits for it, counts from that end on. So all add up to the
    time between the first start and the last end.
    """
    events = [event for event in profile.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    events.sort(key=lambda event: event.start_ns() + event.duration_ns())
    added: dict[str, float] = {}
    end = events[0].start_ns() if events else 0
    for event in events:
        start, own_end = event.start_ns(), event.start_ns() + event.duration_ns()
        added[IDLE] = added.get(IDLE, 0.0) + max(0, start - end) / 1e3
        added[event.name()] = added.get(event.name(), 0.0) + (own_end - max(start, end)) / 1e3
        end = own_end
    return added


def _first_token(llm: Any, kind: str, length: int) -> Row:
    """Time one prompt up to its first token, the engine's own work included."""
    generate(llm, _random_prompts(1, length), 1)
    elapsed = []
    for seed in range(1, 8):
        prompts = _random_prompts(1, length, seed)
        begin = time.perf_counter()
        generate(llm, prompts, 1)
        elapsed.append(time.perf_counter() - begin)
    us = statistics.median(elapsed) * 1e6
    return {"kernel": KINDS[kind], "subject": "first_token", "m": length, "us": us, "least_us": min(elapsed) * 1e6}
