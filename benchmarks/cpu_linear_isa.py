#!/usr/bin/env python3
"""One token under each instruction set: every K and codebook beside torch's bf16 linear under the same set.

    python benchmarks/cpu_linear_isa.py [--isa avx2 avx512_vbmi] [--shape 4096x14336] [--passes 2] [--write]

torch and oneDNN choose their kernels when they load, so each set is measured in a process of its own, whose
environment keeps them to it; the processes take turns. In each, the peer and a kernel take turns, with more weights
than a core's caches hold. One thread: the least CPU time, which other work on the machine changes little.
All threads: the least wall time, which needs idle processors: left out where others kept more than a quarter of one
busy.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_exl3.processors import busy_by_others
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_linear_isa.json"

PEERS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx2_vnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512_vbmi": {},
    "avx512_words": {},
    "avx512_fp16": {},
    "amx": {},
}
"""Environment variables that limit torch (oneDNN) to each instruction set; the last may use all that the processor has,
such as AMX."""

ROUNDS = 12


def child(isa: str, shape: str) -> None:
    """Measure one set in this process and print rows as JSON lines."""
    import torch
    from cpu_linear import BEYOND_CACHE, Trellis

    from vllm_exl3.pack.stored import Codebook

    in_features, out_features = map(int, shape.split("x"))
    x = torch.randn(1, in_features).bfloat16()
    copies = max(2, BEYOND_CACHE // (2 * in_features * out_features))
    dense = [torch.randn(out_features, in_features).bfloat16() for _ in range(copies)]
    threads = torch.get_num_threads()
    for codebook in (Codebook.MUL1, Codebook.MCG, Codebook.INST3):
        for half_bits in range(2, 17, 2):
            trellis = Trellis(codebook, half_bits, in_features, out_features)
            calls = {
                "peer": lambda turn: torch.nn.functional.linear(x, dense[turn % len(dense)]),
                "native": lambda turn, trellis=trellis: trellis(x, turn),
            }
            for count, clock in ((1, time.process_time), (threads, time.perf_counter)):
                if count == 1 and clock is time.perf_counter:
                    continue
                torch.set_num_threads(count)
                start, before = time.monotonic(), busy_by_others()
                least = dict.fromkeys(calls, float("inf"))
                for turn in range(ROUNDS):
                    for name, call in calls.items():
                        begin = clock()
                        call(turn)
                        if turn:
                            least[name] = min(least[name], (clock() - begin) * 1e6)
                after = busy_by_others()
                others = None if None in (before, after) else (after - before) / (time.monotonic() - start)  # type: ignore[operator]
                row = {"kernel": "native", "isa": isa, "in": in_features, "out": out_features, "m": 1}
                row |= {"bits": half_bits / 2, "codebook": codebook.label, "threads": count}
                row |= {"us": round(least["native"], 1), "bf16_us": round(least["peer"], 1)}
                print(json.dumps(row | {"others": None if others is None else round(max(others, 0), 2)}), flush=True)


def measure(isas: list[str], shape: str, passes: int) -> list[dict[str, Any]]:
    """Rows of every set, each the better of some passes over all sets."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _ in range(passes):
        for isa in isas:
            environment = {**os.environ, **PEERS[isa], "VLLM_EXL3_CPU_ISA": isa}
            command = [sys.executable, __file__, "--child", isa, "--shape", shape]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            for line in done.stdout.splitlines():
                row = json.loads(line)
                if row["threads"] > 1 and (row["others"] is None or row["others"] > 0.25):
                    continue
                key = tuple(row[name] for name in ("isa", "codebook", "bits", "threads"))
                earlier = best.setdefault(key, row)
                if row["us"] < earlier["us"]:
                    best[key], row = row, earlier
                best[key]["bf16_us"] = min(best[key]["bf16_us"], row["bf16_us"])
    for row in best.values():
        row["over_torch_bf16"] = round(row["bf16_us"] / row["us"], 3)
        row["gweights"] = round(row["in"] * row["out"] / row["us"] / 1e3, 2)
    return list(best.values())


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--isa", nargs="+", default=["avx2", "avx2_vnni", "avx512", "avx512_vbmi", "amx"], choices=PEERS
    )
    parser.add_argument("--shape", default="4096x14336")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.shape)
        return
    rows = measure(arguments.isa, arguments.shape, arguments.passes)
    for row in rows:
        print(
            f"{row['isa']:11s} {row['codebook']:5s} K={row['bits']:g} {row['threads']} threads: {row['us']:6.0f} us, "
            f"{row['gweights']:5.2f} G weights/s, {row['over_torch_bf16']:.2f} x torch bf16 ({row['bf16_us']:.0f} us), "
            f"others {row['others']}"
        )
    if arguments.write:
        facts = {"time": "one thread: least CPU time; more: least wall time", "torch": PEERS}
        command = "python benchmarks/cpu_linear_isa.py --write"
        write_results(RESULTS, rows, machine="cpu", command=command, facts=facts)


if __name__ == "__main__":
    main()
