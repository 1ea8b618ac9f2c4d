#!/usr/bin/env python3
"""Routed experts divided over tiers, on a GPU: the op alone, and a Qwen3-30B-A3B-shaped model through stock vLLM.

    python benchmarks/gpu_tiers.py [--out benchmarks/results/h200/tiers.json] [--jobs K4:gpu:1 K4:host:0.5 op ...]

A job is PACK:TIER:SHARE: the share of experts that stays in GPU memory, the others in a tier. Packs are random, of 8
layers of 128 experts: ``K4``, and ``mixed`` (K 3, 4 and 5 by expert and projection). Engines start side by side, each
in a process of its own, and take turns; CUDA graphs are of whole decode steps. Tokens per second are those of decoding
alone, from the difference between two output lengths. ``tokens_equal`` says whether they are those of the same pack all
on the GPU: of ``host`` they must be, of ``cpu`` they may part at a near tie. ``op`` times one layer under uniform
routing and under Zipf's law (exponent 1, the most used experts on the GPU), with the bandwidth of plain copies over the
bus beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from vllm_exl3.pack import Pack
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import need_gpus, write_results

Row = dict[str, Any]

SHAPE = {"hidden": 2048, "intermediate": 768, "layers": 8, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": 32768,
         "architecture": "Qwen3MoeForCausalLM", "experts": 128, "top_k": 8, "head_bits": 6}  # fmt: skip
OUT = Path(__file__).parent / "results" / "h200" / "tiers.json"
JOBS = ["K4:gpu:1", "mixed:gpu:1", "op"]
JOBS += [f"K4:{tier}:{share}" for share in (0.5, 0.3, 0.0) for tier in ("host", "cpu")]
JOBS += ["mixed:host:0.5", "mixed:cpu:0.5"]
BATCHES, SHARES = (1, 8, 32), (1.0, 0.5, 0.3, 0.1, 0.0)
SHORT, LONG, REPEATS = 8, 24, 2
ROW, TOKENS, READY = "ROW ", "TOKENS ", "READY"
"""What lines of a job's output begin with."""


def mixed_bits(key: str) -> int:
    """K by expert and projection; 4 for all other linears."""
    _, _, rest = key.partition(".experts.")
    expert, _, projection = rest.partition(".")
    return 3 + (int(expert) + len(projection)) % 3 if rest else 4


def write(folder: Path, kind: str) -> None:
    """A random pack."""
    write_random_pack(folder / kind, bits=4 if kind == "K4" else mixed_bits, **SHAPE)


def settings(pack: Path, tier: str, share: float) -> dict[str, str]:
    """Environment variables that leave this share of the experts in GPU memory."""
    if tier == "gpu":
        return {}
    sizes = (linear.trellis.nbytes for key, linear in Pack.open(pack).linears.items() if ".experts." in key)
    return {"VLLM_EXL3_EXPERTS": tier, "VLLM_EXL3_EXPERTS_GPU_GIB": f"{(share * sum(sizes) + 8) / 2**30:.9f}"}


def serve(folder: Path, kind: str) -> None:
    """One engine: says when it is ready, and decodes when a line comes in."""
    from gpu_serve import load

    from vllm_exl3 import runtime_diagnostics

    llm = load(
        folder / kind,
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_memory_bytes=1 << 29,
        gpu_memory_utilization=0.05,
        compilation_config={
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(BATCHES),
        },
    )  # fmt: skip
    facts = runtime_diagnostics()["models"][-1]
    print(READY, flush=True)
    sys.stdin.readline()
    for batch in BATCHES:
        us, tokens = decode(llm, batch)
        row = {"kernel": "native", "subject": "decode", "m": batch, "us": us, "tokens_per_s": batch * 1e6 / us}
        print(ROW + json.dumps({**row, "tiers": facts["tiers"], "bytes": facts["bytes"]}))
        print(TOKENS + json.dumps(tokens), flush=True)
    os._exit(0)  # vLLM's own shutdown can hang for a minute


def decode(llm: Any, batch: int) -> tuple[float, list[list[int]]]:
    """Microseconds of a decode step, the least of some, and the longer continuations."""
    from tests.serving.engine import generate

    rng = np.random.default_rng(batch)
    prompts = [[int(token) for token in rng.integers(0, SHAPE["vocab"], 8)] for _ in range(batch)]
    generate(llm, prompts, SHORT)
    steps, tokens = [], []
    for _ in range(REPEATS):
        elapsed = []
        for length in (SHORT, LONG):
            begin = time.perf_counter()
            tokens = generate(llm, prompts, length)
            elapsed.append(time.perf_counter() - begin)
        steps.append((elapsed[1] - elapsed[0]) / (LONG - SHORT))
    return 1e6 * min(steps), tokens


def time_op() -> None:
    """One layer, under graphs; copies of a graph differ in their routing."""
    from gpu_tiers_op import op_rows

    print(READY, flush=True)
    sys.stdin.readline()
    for row in op_rows(SHAPE, BATCHES, SHARES):
        print(ROW + json.dumps(row), flush=True)
    os._exit(0)


def run(folder: Path, jobs: list[str]) -> Iterator[Row]:
    """Start all jobs at once, let them measure one after another, and compare tokens."""
    environment = {**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    processes = {}
    for job in jobs:
        kind, tier, share = (*job.split(":"), "", "")[:3]
        extra = settings(folder / kind, tier, float(share)) if tier else {}
        command = [sys.executable, __file__, "--folder", str(folder), "--job", job]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes[job] = subprocess.Popen(command, text=True, env=environment | extra, **pipes)
    ready = {job: any(line.strip() == READY for line in process.stdout) for job, process in processes.items()}
    expected: dict[str, list[str]] = {}
    for job, process in processes.items():
        if not ready[job]:
            continue
        process.stdin.write("go\n")
        process.stdin.flush()
        rows, tokens = [], []
        for line in process.stdout:
            rows += [json.loads(line.removeprefix(ROW))] if line.startswith(ROW) else []
            tokens += [line] if line.startswith(TOKENS) else []
        if ":" not in job:
            yield from rows
            continue
        kind, tier, share = job.split(":")
        reference = expected.setdefault(kind, tokens) if tier == "gpu" else expected.get(kind)
        for row, found, wanted in zip(rows, tokens, reference or [None] * len(tokens), strict=True):
            equal = None if wanted is None else found == wanted
            yield {**row, "pack": kind, "tier": tier, "resident": float(share), "tokens_equal": equal}
    failed = [job for job, process in processes.items() if process.wait() or not ready[job]]
    if failed:
        print(f"no or not all results of {', '.join(failed)}: the log of its process is above", file=sys.stderr)


def shown(row: Row) -> str:
    """A row of the table."""
    names = ("subject", "pack", "routing", "tier", "resident", "m")
    what = " ".join(str(row[name]) for name in names if name in row)
    numbers = [f"{row['us']:.0f} us"] if "us" in row else []
    numbers += [f"{row['tokens_per_s']:.0f} tokens/s"] if "tokens_per_s" in row else []
    numbers += [f"{row['gbps']:.1f} GB/s of host memory"] if row.get("gbps") else []
    numbers += [] if row.get("tokens_equal") is None else [f"tokens equal: {row['tokens_equal']}"]
    return f"{what:<36} {', '.join(numbers)}"


def main() -> None:
    """Measure and write the file; with ``--job`` be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", nargs="+", default=JOBS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        time_op() if options.job == "op" else serve(options.folder, options.job.split(":")[0])
        return
    need_gpus(1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with ProcessPoolExecutor(2) as pool:
            list(pool.map(write, [folder] * 2, sorted({job.split(":")[0] for job in options.jobs if ":" in job})))
        for row in run(folder, options.jobs):
            rows.append(row)
            print(shown(row), flush=True)
    write_results(options.out, rows, machine="h200", command="python benchmarks/gpu_tiers.py")


if __name__ == "__main__":
    main()
