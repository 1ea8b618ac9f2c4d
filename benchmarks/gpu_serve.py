#!/usr/bin/env python3
"""Dense EXL3 packs through stock vLLM on a GPU: golden logits, graphs against no graphs, and decode speed.

    python benchmarks/gpu_serve.py golden PACK ...          relative error and KL divergence from exllamav3's logits;
                                                            several packs are served at the same time
    python benchmarks/gpu_serve.py graphs PACK              tokens with FULL_AND_PIECEWISE graphs and with none
    python benchmarks/gpu_serve.py speed {exl3,bf16} [--batches 1 8 32]
    (each with --out FILE: rows are written as they are measured)

``speed`` serves an 8B-shaped model (32 layers, 4096/14336, 8 KV heads): random trellises of 4 bits with a head of 6,
or random bf16 weights. Tokens per second are those of decoding alone, from the difference between two output lengths.
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from tests.serving.engine import generate, logits_of, model_of
from vllm_exl3.ops import backends
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import write_results

SHAPE = {
    "hidden": 4096,
    "intermediate": 14336,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 128256,
}
Row = dict[str, Any]

_ROW = "ROW "
"""Begins the lines that hold results."""

PROMPT = 128
SHORT, LONG = 16, 272


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
        lines = [line for line in job.communicate()[0].splitlines() if line.startswith(_ROW)]
        if not lines:
            raise SystemExit(
                f"{folder}: the pack's process ended with {job.returncode} and no result; its log is above"
            )
        yield json.loads(lines[-1].removeprefix(_ROW))


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


def speed(kind: str, batches: list[int]) -> Iterator[Row]:
    """Decode an 8B-shaped model at several batch sizes."""
    with tempfile.TemporaryDirectory() as temporary:
        if kind == "exl3":
            folder = write_random_pack(Path(temporary) / "pack", **SHAPE, bits=4, head_bits=6)
            llm = load(folder, dtype="bfloat16")
        else:
            folder = bf16_config(Path(temporary) / "bf16")
            llm = load(folder, dtype="bfloat16", load_format="dummy")
        weights = sum(parameter.nbytes for parameter in model_of(llm).parameters())
        memory = torch.cuda.memory_allocated()
        for batch in batches:
            yield decode(llm, kind, batch) | {"weight_bytes": weights, "allocated_bytes": memory}


def decode(llm: Any, kind: str, batch: int) -> Row:
    """Time one batch size, and attribute the GPU's time to kernels."""
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in rng.integers(0, SHAPE["vocab"], PROMPT)] for _ in range(batch)]
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(llm, prompts, SHORT)
    kernels = {event.key: event.self_device_time_total for event in profile.key_averages()}
    ours = sum(time_ for name, time_ in kernels.items() if name.startswith("exl3_"))
    return {
        "kernel": "native" if kind == "exl3" else "cublas_bf16",
        "subject": "decode",
        "m": batch,
        "us": step * 1e6,
        "tokens_per_second": batch / step,
        "exl3_share_of_gpu_time": ours / sum(kernels.values()),
    }


def bf16_config(folder: Path) -> Path:
    """A folder that describes the bf16 model of the same shape; its weights are vLLM's dummies."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": SHAPE["hidden"],
        "intermediate_size": SHAPE["intermediate"],
        "num_hidden_layers": SHAPE["layers"],
        "num_attention_heads": SHAPE["heads"],
        "num_key_value_heads": SHAPE["kv_heads"],
        "head_dim": SHAPE["head_dim"],
        "vocab_size": SHAPE["vocab"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed")
    if arguments.subject == "golden":
        rows = golden([Path(value) for value in arguments.values])
    elif arguments.subject == "graphs":
        rows = graphs(Path(arguments.values[0]))
    else:
        rows = speed(arguments.values[0], arguments.batches)
    for row in rows:
        print(_ROW + json.dumps(row), flush=True)
        if arguments.out:
            _write(arguments.out, row)
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


if __name__ == "__main__":
    main()
