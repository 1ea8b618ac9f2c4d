#!/usr/bin/env python3
"""Dense EXL3 packs through stock vLLM on a GPU: golden logits, graphs against no graphs, and decode speed.

    python benchmarks/gpu_serve.py golden PACK ...          relative error and KL divergence from exllamav3's logits;
                                                            several packs are served at the same time
    python benchmarks/gpu_serve.py graphs PACK              tokens with FULL_AND_PIECEWISE graphs and with none
    python benchmarks/gpu_serve.py speed exl3 bf16 [--batches 1 8 32]
    (each with --out FILE: rows are written as they are measured)

``speed`` serves an 8B-shaped model (32 layers, 4096/14336, 8 KV heads): random trellises of 4 bits with a head of 6,
or random bf16 weights. Tokens per second are those of decoding alone, from the difference between two output lengths;
time to first token is of prompts of 128, 1024 and 8192 tokens. Two kinds start side by side and take turns.
"""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu_serve_speed import KINDS, ROW, Row, speed, take_turns

from tests.serving.engine import generate, logits_of
from vllm_exl3.ops import backends
from vllm_exl3.tools.results import write_results


def load(folder: Path | str, **options: Any) -> Any:
    """An engine on the GPU with vLLM's defaults but for size."""
    from vllm import LLM

    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "attention_config": {"backend": "FLASH_ATTN"},
        "seed": 0,
    }
    return LLM(str(folder), **{**defaults, **options})


def unload(llm: Any) -> None:
    """Free the engine's memory, so that another fits beside none."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def golden(folders: list[Path]) -> Iterator[Row]:
    """Compare whole forward passes with exllamav3's own, a process a pack."""
    if len(folders) == 1:
        yield golden_of(folders[0])
        return
    jobs = [
        subprocess.Popen([sys.executable, __file__, "golden", str(folder)], stdout=subprocess.PIPE, text=True)
        for folder in folders
    ]
    for folder, job in zip(folders, jobs, strict=True):
        lines = [line for line in job.communicate()[0].splitlines() if line.startswith(ROW)]
        if not lines:
            raise SystemExit(
                f"{folder}: the pack's process ended with {job.returncode} and no result; its log is above"
            )
        yield json.loads(lines[-1].removeprefix(ROW))


def golden_of(folder: Path) -> Row:
    """One pack."""
    reference = np.load(folder / "golden.npz")
    theirs = torch.from_numpy(reference["logits"].astype(np.float64))
    # Gemma 2 refuses float16.
    dtype = "bfloat16" if "gemma2" in folder.name else "float16"
    backends.reset_calls()
    options = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28}
    llm = load(folder, dtype=dtype, enforce_eager=True, **options)
    ours = logits_of(llm, [int(token) for token in reference["ids"]])[:, : theirs.shape[1]].double().cpu()
    p, q = torch.log_softmax(theirs, -1), torch.log_softmax(ours, -1)
    return {
        "kernel": "+".join(sorted({backend for _, backend, _ in backends.calls()})),
        "subject": "logits",
        "pack": folder.name,
        "dtype": dtype,
        "error": float((ours - theirs).norm() / theirs.norm()),
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
    }


def graphs(folder: Path) -> Iterator[Row]:
    """Greedy tokens with and without CUDA graphs, at one compilation mode."""
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9], [100, 200, 300, 400, 500, 600, 11]]
    tokens = {}
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        llm = load(folder, dtype="float16", max_num_seqs=4, compilation_config={"cudagraph_mode": mode})
        tokens[mode] = generate(llm, prompts, 32)
        unload(llm)
    equal = len({str(t) for t in tokens.values()}) == 1
    yield {"kernel": "native", "subject": "graphs", "pack": folder.name, "equal": equal}


def _write(out: Path, row: Row) -> None:
    """Put one row into the results file, in the place of what it measures anew."""
    identity = [key for key in ("subject", "kernel", "pack", "m") if key in row]
    write_results(
        out,
        [row],
        machine="h200",
        command="python benchmarks/gpu_serve.py",
        replaces=lambda old: all(old.get(key) == row[key] for key in identity),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("golden", "graphs", "speed"))
    parser.add_argument("values", nargs="+", help="pack folders, or exl3 or bf16 for speed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--wait", action="store_true", help="of speed: say READY, and begin when a line comes in")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed")
    if arguments.subject == "golden":
        rows = golden([Path(value) for value in arguments.values])
    elif arguments.subject == "graphs":
        rows = graphs(Path(arguments.values[0]))
    elif unknown := set(arguments.values) - set(KINDS):
        sys.exit(f"speed of {', '.join(sorted(unknown))}: expected {' and '.join(KINDS)}")
    elif len(arguments.values) == 1:
        rows = speed(load, arguments.values[0], arguments.batches, wait=arguments.wait)
    else:
        rows = take_turns(arguments.values, arguments.batches)
    for row in rows:
        print(ROW + json.dumps(row), flush=True)
        if arguments.out:
            _write(arguments.out, row)
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


if __name__ == "__main__":
    main()
