#!/usr/bin/env python3
"""One layer's attention over the int4 KV cache on a GPU, beside vLLM's own and fp8, each against float64.

    python benchmarks/gpu_kv.py [--stock] --out FILE      decode and prefill of 24 query / 4 KV heads of 256

`gpu_kv_serve.py` times whole engines.
"""

import argparse
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from vllm_exl3.tools.results import need_gpus, write_results

CONTEXTS = (32768, 131072, 262144)


def layers(contexts: list[int], stock: bool) -> Iterator[dict[str, Any]]:
    """One row a kernel and shape."""
    from vllm_exl3.cuda.timing import copy_bandwidth
    from vllm_exl3.serving.kv_bench import Caches, Shape

    shapes = [Shape(context, batch, query) for context in contexts for batch in (1, 8) for query in (1, 2)]
    chunks = [Shape(context, 1, query) for context in contexts[1:] for query in (1024, 8192)]
    caches = Caches(shapes)
    for shape in [*shapes, *chunks]:
        runs: list[tuple[str, Callable[[Any], tuple[float, float]]]] = [
            ("int4", caches.ours),
            ("fp8_fa3", caches.fp8_flash),
        ]
        if shape.query == 1:
            runs.append(("fp8_triton", caches.fp8_triton))
        if stock and shape.batch == 1 and shape.query <= 2:
            runs.append(("stock_int4", caches.stock))
        for kernel, run in runs:
            us, error = run(shape)
            slot = 264 if "int4" in kernel else 512
            row = {
                "kernel": kernel, "subject": "decode" if shape.query <= 2 else "prefill", "context": shape.context,
                "batch": shape.batch, "query": shape.query, "us": round(us, 2), "error": error,
            }  # fmt: skip
            if shape.query <= 2:
                row["byte_us"] = round(shape.nbytes(slot) / copy_bandwidth() * 1e6, 2)
            print(row, flush=True)
            yield row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--stock", action="store_true", help="vLLM's own int4 attention too (slow)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    need_gpus()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed")
    started = time.perf_counter()
    done: list[dict[str, Any]] = []
    for row in layers(arguments.contexts, arguments.stock):
        done.append(row)
        if arguments.out:
            _write(arguments.out, done)
        if time.perf_counter() - started > arguments.seconds:
            print("out of time")
            break
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown can hang for a minute after the last result


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    keys = {
        (row["subject"], row["kernel"], row.get("mode"), row.get("context"), row.get("batch"), row.get("query"))
        for row in rows
    }
    write_results(
        path,
        rows,
        machine="h200",
        command="python benchmarks/gpu_kv.py " + " ".join(sys.argv[1:]),
        replaces=lambda row: (
            row["subject"], row["kernel"], row.get("mode"), row.get("context"), row.get("batch"), row.get("query"),
        ) in keys,
        facts={"cuda": torch.version.cuda},
    )  # fmt: skip


if __name__ == "__main__":
    main()
