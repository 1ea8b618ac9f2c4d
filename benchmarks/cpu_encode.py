#!/usr/bin/env python3
"""The CPU encoder: time a tile and squared error, at every rate, on Gaussian weights.

    python benchmarks/cpu_encode.py [--size 512] [--write]
    python benchmarks/cpu_encode.py --isa avx2 avx512_vbmi [--write]

Errors are relative to the weights' square: at the codebook's own scale, as the format's description
gives them, and at the scale that `quantize_linear` uses.

With --isa, instruction sets take turns in one run, on one thread: CPU time a tile, the least of some rounds,
so that other work on the machine changes little.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from vllm_exl3.cpu.library import library
from vllm_exl3.cpu.quantize import encode, quantize_linear
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import TILE, Codebook
from vllm_exl3.processors import allowed, busy_by_others
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_encode.json"
BY_ISA = RESULTS.with_name("cpu_encode_isa.json")
ROUNDS = 7
KINDS = [
    *((Codebook.MUL1, half_bits) for half_bits in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)),
    *((codebook, half_bits) for codebook in (Codebook.MCG, Codebook.INST3) for half_bits in (4, 8, 12)),
]
SPREAD = {Codebook.MUL1: 1.0, Codebook.MCG: 1.2441, Codebook.INST3: 1.2437}
"""Root mean square of each codebook's values."""


def measure(codebook: Codebook, half_bits: int, size: int, threads: int) -> dict[str, Any]:
    """Encode a square once to warm up and once for the clock, then quantize it."""
    weights = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    scaled = weights * np.float32(SPREAD[codebook])
    tiles = (size // TILE) ** 2
    encode(scaled[:128], half_bits, codebook, threads=threads)
    start = time.perf_counter()
    trellis = encode(scaled, half_bits, codebook, threads=threads)
    us = (time.perf_counter() - start) * 1e6
    decoded = codec.decode(trellis, half_bits, codebook)
    error = np.square(decoded - scaled, dtype=np.float64).mean() / np.square(scaled, dtype=np.float64).mean()
    start = time.perf_counter()
    quantized = quantize_linear(weights, half_bits, codebook, threads=threads)
    whole = (time.perf_counter() - start) * 1e6
    row = {
        "kernel": "encode",
        "in": size,
        "out": size,
        "bits": half_bits / 2,
        "codebook": codebook.label,
        "threads": threads,
        "us": round(us),
        "us_tile": round(us / tiles, 1),
        "us_tile_quantize": round(whole / tiles, 1),
        "error": float(f"{error:.3g}"),
        "error_best_scale": float(f"{quantized.error:.3g}"),
    }
    print(
        f"{codebook.label:5s} K={half_bits / 2:<4g} {us / tiles:6.0f} us a tile ({whole / tiles:.0f} with scales and "
        f"rotations), error {error:.3g}, at the best scale {quantized.error:.3g}",
        flush=True,
    )
    return row


def compare(isas: list[str], rounds: int) -> list[dict[str, Any]]:
    """CPU time of every kind under each instruction set, which take turns."""
    weights = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
    result = []
    for codebook, half_bits in KINDS:
        scaled = weights * np.float32(SPREAD[codebook])
        times: dict[str, list[float]] = {isa: [] for isa in isas}
        trellises = {}
        for turn in range(rounds + 1):
            for isa in isas:
                select(isa)
                start = time.process_time()
                trellises[isa] = encode(scaled, half_bits, codebook, threads=1)
                if turn:
                    times[isa].append((time.process_time() - start) / (128 // TILE) ** 2 * 1e6)
        if any((trellis != trellises[isas[0]]).any() for trellis in trellises.values()):
            raise SystemExit(f"{codebook.label} K={half_bits / 2:g}: the instruction sets find different trellises")
        for isa in isas:
            row = {"kernel": "encode", "isa": isa, "bits": half_bits / 2, "codebook": codebook.label, "threads": 1}
            result.append(row | {"us_tile": round(min(times[isa]), 1)})
        least = ", ".join(f"{isa} {min(times[isa]):.0f}" for isa in isas)
        print(f"{codebook.label:5s} K={half_bits / 2:<4g} us of CPU time a tile: {least}", flush=True)
    return result


def select(isa: str) -> None:
    """Choose an instruction set for the calls that follow."""
    if library().exl3_select_isa(isa.encode()):
        raise SystemExit(f"this processor does not run {isa}")


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--isa", nargs="+", help="compare these instruction sets, on one thread")
    parser.add_argument("--write", action="store_true", help="write cpu_encode.json, or cpu_encode_isa.json for --isa")
    arguments = parser.parse_args()
    if arguments.isa:
        start, before = time.monotonic(), busy_by_others()
        rows = compare(arguments.isa, ROUNDS)
        after = busy_by_others()
        others = None if before is None or after is None else round((after - before) / (time.monotonic() - start), 2)
        command = f"python benchmarks/cpu_encode.py --isa {' '.join(arguments.isa)} --write"
        facts = {"processors_busy_by_others": others, "time": "CPU time of one thread, the least of some rounds"}
        if arguments.write:
            write_results(BY_ISA, rows, machine="cpu", command=command, facts=facts)
        return
    rows = [measure(codebook, half_bits, arguments.size, allowed()) for codebook, half_bits in KINDS]
    if arguments.write:
        write_results(RESULTS, rows, machine="cpu", command="python benchmarks/cpu_encode.py --write")


if __name__ == "__main__":
    main()
