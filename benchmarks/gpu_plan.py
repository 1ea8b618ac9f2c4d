#!/usr/bin/env python3
"""GPU memory as ``vllm-exl3 plan`` predicts it and as vLLM allocates it, for six packs of different kinds.

    python benchmarks/gpu_plan.py [KIND ...] [--out benchmarks/results/h200/plan.json]

Each kind is served by vLLM in a process of its own, which must have the GPU to itself: vLLM measures free memory. The
share of memory that vLLM may take is small, so that an error shows. ``error`` is the larger of those of the weights and
of the KV cache, relative to all that vLLM may take; 3 % are allowed. Tokens of the cache are compared for the bytes
that vLLM found, so that they judge the arithmetic of layers alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm_exl3.pack import Pack
from vllm_exl3.plan.cache import cache_capacity
from vllm_exl3.plan.gpus import find_gpu
from vllm_exl3.plan.layers import cache_layers
from vllm_exl3.plan.serving_plan import Plan, Wish, make_plan
from vllm_exl3.tools.random_pack import write_random_pack
from vllm_exl3.tools.results import need_gpus, write_results

ALLOWED = 0.03
LENGTH = 4096
SMALL = {"heads": 16, "kv_heads": 4, "head_dim": 128, "vocab": 32000, "layers": 8}
GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "packs"

KINDS: dict[str, dict[str, Any]] = {
    "llama-8b": {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128,
                 "vocab": 128256, "bits": 4, "head_bits": 6},
    "qwen2-biased-padded": {**SMALL, "hidden": 2000, "intermediate": 5504, "heads": 20, "kv_heads": 4, "head_dim": 100,
                            "architecture": "Qwen2ForCausalLM", "bits": 3, "head_bits": 6},
    "qwen3-experts": {**SMALL, "hidden": 2048, "intermediate": 768, "experts": 64, "top_k": 8, "bits": 3,
                      "head_bits": 6, "architecture": "Qwen3MoeForCausalLM"},
    "llama-tied-dense-head": {**SMALL, "hidden": 2048, "intermediate": 8192, "vocab": 128256, "bits": 2,
                              "head_bits": None, "tie": True},
    "mistral-mixed-bits": {**SMALL, "hidden": 3072, "intermediate": 8192, "heads": 24, "kv_heads": 8,
                           "architecture": "MistralForCausalLM", "bits": "mixed", "head_bits": 8},
    "gemma2-windows": {"golden": "gemma2-6.0-mcg"},
}  # fmt: skip
"""Shapes as `write_random_pack` takes them, or a golden pack."""

FLAGS: dict[str, dict[str, Any]] = {
    "mistral-mixed-bits": {"kv_cache_dtype": "int4_per_token_head"},
    "qwen3-experts": {"kv_cache_dtype": "fp8"},
}
UTILIZATION = {"llama-8b": 0.15}
DTYPE = {"gemma2-windows": "bfloat16"}


def write_kind(kind: str, folder: Path, *, hollow: bool = False) -> Path:
    """The pack of a kind."""
    shape = dict(KINDS[kind])
    if golden := shape.pop("golden", None):
        return GOLDEN / str(golden)
    if shape["bits"] == "mixed":
        shape["bits"] = lambda key: 2 + len(key) % 4
    return write_random_pack(folder / kind, hollow=hollow, **shape)


def planned(kind: str, pack: Pack, gpu_bytes: int, gpu_name: str = "H200") -> Plan:
    """The plan of a kind on a GPU of this many bytes."""
    wish = Wish(
        find_gpu(gpu_name), (gpu_bytes,), length=min(LENGTH, 2048) if "golden" in KINDS[kind] else LENGTH, seqs=64,
        cache_type=FLAGS.get(kind, {}).get("kv_cache_dtype", "auto"), utilization=UTILIZATION.get(kind, 0.08),
    )  # fmt: skip
    return make_plan(pack, wish)


def row(kind: str, pack: Pack, plan: Plan, measured: dict[str, int]) -> dict[str, Any]:
    """A plan beside what vLLM took."""
    (rank,) = plan.ranks
    name = plan.wish.cache_type
    held = cache_capacity(cache_layers(pack.config).layers, name, measured["kv_bytes"], plan.length, chunk=plan.chunk)
    errors = {
        "weights": abs(rank.placement.gpu - measured["model_bytes"]) / rank.budget,
        "cache": abs(rank.cache_bytes - measured["kv_bytes"]) / rank.budget,
    }
    return {
        "kernel": "native",
        "subject": "plan",
        "pack": kind,
        "cache_type": name,
        "budget_bytes": rank.budget,
        "planned_weights": rank.placement.gpu,
        "model_bytes": measured["model_bytes"],
        "planned_cache": rank.cache_bytes,
        "kv_bytes": measured["kv_bytes"],
        "planned_workspace": sum(rank.workspace.values()),
        "tokens_of_these_bytes": held.tokens,
        "kv_tokens": measured["kv_tokens"],
        "error": max(errors.values()),
    }


def measure(kind: str) -> dict[str, Any]:
    """Serve one kind in this process."""
    import torch

    from benchmarks.gpu_serve import load
    from benchmarks.gpu_serve_memory import measure_start

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_kind(kind, Path(temporary))
        pack = Pack.open(folder)
        plan = planned(kind, pack, torch.cuda.get_device_properties(0).total_memory)
        options = {
            "dtype": DTYPE.get(kind, "float16"), "max_model_len": plan.length, "max_num_seqs": plan.seqs,
            "max_num_batched_tokens": plan.chunk, "gpu_memory_utilization": plan.wish.utilization,
            "enable_prefix_caching": True, **FLAGS.get(kind, {}),
        }  # fmt: skip
        if "kv_cache_dtype" in options:
            options["attention_config"] = {}
        found = measure_start(lambda: load(folder, **options))
        return row(kind, pack, plan, found)


def main() -> int:
    """Run each kind in a process of its own; the exit status is 1 if one is off by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help="one kind, in this process")
    arguments = parser.parse_args()
    need_gpus()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if arguments.here:
        print("ROW", json.dumps(measure(arguments.kinds[0])), flush=True)
        os._exit(0)  # vLLM's own shutdown can hang for a minute
    worst = 0.0
    for kind in arguments.kinds or KINDS:
        command = [sys.executable, __file__, kind, "--here"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if not lines:
            print(f"{kind}: no result, exit status {done.returncode}", flush=True)
            worst = 1.0
            continue
        found = json.loads(lines[-1].removeprefix("ROW "))
        worst = max(worst, found["error"])
        print(json.dumps(found), flush=True)
        if arguments.out:
            write_results(
                arguments.out,
                [found],
                machine="h200",
                command="python benchmarks/gpu_plan.py",
                replaces=lambda old, kind=kind: old.get("pack") == kind,
            )
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
