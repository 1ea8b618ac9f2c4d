#!/usr/bin/env python3
"""An n-gram table of 30 GiB looked up on disk: rows a second, bytes read for each, and the memory that it takes.

    python benchmarks/ngram_disk.py [--folder FOLDER] [--write]

The table has Qwen3.8-Flash-Next's shape: 320 million rows of 5 bits, 16 heads. The file is sparse: rows that are
looked up are written, one to a disk page, the rest are holes. Ids follow Zipf's law, as n-grams do. `cold` begins
without any of the file in the page cache, `warm` repeats the same look-ups; `decode` has 8 tokens a look-up, `prefill`
2048. Everything runs in one process, whose peak of resident memory is what the last column says; `torch` alone takes
most of it.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from vllm_exl3.ops.ngram_tables import DiskTable
from vllm_exl3.pack import Pack
from vllm_exl3.pack.ngram import read_heads
from vllm_exl3.pack.ngram_rows import NgramRows
from vllm_exl3.tools.random_ngram import write_ngram_table
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "ngram_disk.json"
KEY = "model.layers.1.ple.ple_embedding.ngram_embedding"
ROWS, BITS, HEADS = 320_001_536, 5, 16
FILLED = 300_000
CACHE_BYTES = 256 << 20
WORKLOADS = {"decode": (8, 400), "prefill": (2048, 8)}
"""Tokens a look-up, look-ups."""


def resident_bytes(field: str = "VmRSS") -> int:
    """This process' resident memory, or its peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def make_table(folder: Path) -> np.ndarray:
    """The sparse table; returns the rows that are filled, by head ``[16, n]``."""
    rng = np.random.default_rng(0)
    size = ROWS // HEADS
    filled = np.arange(HEADS)[:, None] * size + rng.integers(0, size, (HEADS, FILLED // HEADS))
    write_ngram_table(
        folder / "ngram_table.safetensors", KEY,
        rows=ROWS, bits=BITS, head_sizes=[size] * HEADS, multipliers=[3, 5, 7], shards=128, filled=filled.ravel(),
    )  # fmt: skip
    return filled


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def zipf_ids(filled: np.ndarray, tokens: int, rng: np.random.Generator) -> torch.Tensor:
    """Ids ``[tokens, 16]`` of filled rows, a few of them most of the time."""
    rank = rng.zipf(1.1, (tokens, HEADS)) % filled.shape[1]
    return torch.from_numpy(filled[np.arange(HEADS), rank])


def measure(folder: Path, filled: np.ndarray) -> list[dict[str, object]]:
    """One row for each workload, cold and warm."""
    pack = Pack.open(folder)
    heads = read_heads(pack, pack.ngram_tables[KEY])
    rows: list[dict[str, object]] = []
    for name, (tokens, count) in WORKLOADS.items():
        for cache in (CACHE_BYTES, 0):
            forget(folder / "ngram_table.safetensors")
            reader = NgramRows(pack, pack.ngram_tables[KEY], cache)
            table = DiskTable(reader, torch.from_numpy(heads.bias), torch.from_numpy(heads.offsets), 0)
            for state in ("cold", "warm"):
                rng = np.random.default_rng(1)
                every = [zipf_ids(filled, tokens, rng) for _ in range(count)]
                out = torch.empty((tokens, HEADS, 160), dtype=torch.bfloat16)
                before, began = reader.bytes_read, time.perf_counter()
                for ids in every:
                    table(ids, out)
                seconds = time.perf_counter() - began
                lookups = count * tokens * HEADS
                rows.append({
                    "kernel": "disk", "workload": name, "state": state, "cache_mib": cache >> 20,
                    "lookups": lookups, "us": round(seconds / count * 1e6, 1),
                    "lookups_per_s": round(lookups / seconds),
                    "bytes_read_per_lookup": round((reader.bytes_read - before) / lookups, 1),
                    "resident_mib": round(resident_bytes() / 2**20), "peak_mib": round(resident_bytes("VmHWM") / 2**20),
                })  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Make the table in a folder that is removed again, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; needs 2 GB")
    parser.add_argument("--write", action="store_true", help=f"keep the rows in {RESULTS.name}")
    arguments = parser.parse_args()
    base = resident_bytes()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        (folder / "config.json").write_text('{"architectures": ["Qwen4ExpForCausalLM"]}', encoding="utf-8")
        filled = make_table(folder)
        size = (folder / "ngram_table.safetensors").stat().st_size
        rows = measure(folder, filled)
    if arguments.write:
        facts = {"table_bytes": size, "rows": ROWS, "bits": BITS, "filled_rows": FILLED, "resident_at_start": base}
        write_results(
            RESULTS, rows, machine="cpu", command="python benchmarks/ngram_disk.py --write",
            facts=facts,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
