#!/usr/bin/env python3
"""Quantized embeddings and n-gram rows on the CPU: rows a second, beside torch's own look-up in a 16-bit table.

    python benchmarks/cpu_embedding.py [--write]

Tables are larger than the caches, ids at random, results in bfloat16, one thread; the fastest of rounds in which all
kernels took turns, since whatever else runs only adds to a time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_exl3.cpu import rows as native
from vllm_exl3.ops.embedding import embedding_reference
from vllm_exl3.ops.ngram import ngram_reference
from vllm_exl3.ops.ngram_tables import MemoryTable
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_embedding.json"
VOCABULARY, WIDTH = 100_000, 4096
NGRAM_ROWS, HEADS = 4_000_000, 16
COUNTS = (1, 8, 128, 2048)
ROUNDS = 9
REFERENCE_ROWS = 128
"""More than these only wait for the reference."""


def random_words(shape: tuple[int, ...]) -> torch.Tensor:
    """16-bit words whose first of each row is a scale."""
    words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    words[..., 0] = (torch.rand(shape[:-1]) * 0.05 + 0.01).half().view(torch.int16)
    return words


def tables() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales by kind."""
    groups = WIDTH // 256
    return {
        "int8": (torch.randint(-127, 128, (VOCABULARY, WIDTH), dtype=torch.int8), torch.rand(VOCABULARY, 1)),
        "int4": (
            torch.randint(0, 256, (VOCABULARY, WIDTH // 2), dtype=torch.uint8),
            torch.rand(VOCABULARY, WIDTH // 128).bfloat16(),
        ),
        "k4": (
            random_words((VOCABULARY, groups, 65)).view(VOCABULARY, -1),
            torch.randint(0, 2, (groups, 256)).half() * 2 - 1,
        ),
    }


def fastest(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each call: the least over rounds in which every one ran long enough to be timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        repeats[name] = max(1, min(200, int(5e-3 / (time.perf_counter() - began))))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - began) / repeats[name] * 1e6)
    return {name: min(every) for name, every in times.items()}


def measured(found: dict[str, float], table: str, lookups: int, read: int) -> list[dict[str, object]]:
    """Rows for the results file, printed as well."""
    rows = [
        {
            "kernel": kernel,
            "table": "bf16" if kernel == "gather_bf16" else table,
            "lookups": lookups,
            "us": round(us, 2),
            "lookups_per_s": round(lookups / us * 1e6),
            "bytes_read_per_lookup": 2 * WIDTH if kernel == "gather_bf16" else read,
        }
        for kernel, us in found.items()
    ]
    for row in rows:
        print(f"{row['kernel']:12s} {row['table']:8s} {lookups:6d} {row['us']:12.1f} us", flush=True)
    return rows


def main() -> int:
    """Measure every kind and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"keep the rows in {RESULTS.name}")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    dense = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16)
    for kind, (table, scales) in tables().items():
        read = table[0].nbytes + (scales[0].nbytes if kind != "k4" else 0)
        for count in COUNTS:
            ids = torch.randint(0, VOCABULARY, (count,))
            operands = (ids, table, scales, WIDTH, torch.bfloat16)
            calls: dict[str, Callable[[], object]] = {"native": lambda given=operands: native.embedding(*given)}
            if count <= REFERENCE_ROWS:
                calls["reference"] = lambda given=operands: embedding_reference(*given)
            if kind == "int8":
                calls["gather_bf16"] = lambda given=ids: torch.nn.functional.embedding(given, dense)
            rows += measured(fastest(calls), kind, count, read)
    table = MemoryTable(
        random_words((NGRAM_ROWS, 51)), torch.rand(HEADS, 160).half(), torch.arange(HEADS) * (NGRAM_ROWS // HEADS), 0
    )
    for count in COUNTS:
        ids, out = torch.randint(0, NGRAM_ROWS, (count, HEADS)), torch.empty((count, HEADS, 160), dtype=torch.bfloat16)
        given = (ids, None, table.rows, table, out)
        calls = {"native": lambda given=given: native.ngram(*given)}
        if count <= REFERENCE_ROWS:
            calls["reference"] = lambda given=given: ngram_reference(*given)
        rows += measured(fastest(calls), "ngram_k5", count * HEADS, 102)
    if arguments.write:
        write_results(
            RESULTS,
            rows,
            machine="cpu",
            command="python benchmarks/cpu_embedding.py --write",
            facts={"threads_used": 1},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
