#!/usr/bin/env python3
"""exllamav3 as the backend of the linear op beside the native kernels: time and error, in its default mode.

    python benchmarks/gpu_exllamav3.py [--out FILE]

Whole linears on float16 input in replayed graphs, weight copies rotated beyond the L2. Errors are relative to float64.
``EXL3_INT8_GEMV=0`` in the environment selects exllamav3's fp16 mode instead.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_linear_checks import exact, relative

from vllm_exl3.cuda import exllamav3, linear
from vllm_exl3.cuda.timing import Rotation, random_trellis, replayed
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import write_results

SHAPES = ((4096, 14336),)
ROWS = (1, 8, 32, 128)
KINDS = ((Codebook.MUL1, 8), (Codebook.MCG, 8))
Row = dict[str, Any]


def measure(shape: tuple[int, int], codebook: Codebook, half_bits: int, rows: int, buffer: torch.Tensor) -> list[Row]:
    """A row for exllamav3 and one for the native kernels."""
    peer = "exllamav3_fp16" if os.environ.get("EXL3_INT8_GEMV") == "0" else "exllamav3"
    copies = Rotation(shape, half_bits, codebook, buffer)
    x = torch.randn(rows, shape[0], device="cuda", dtype=torch.float16)
    expected = exact(x, copies.shard, copies.trellis[0], copies.suh, copies.svh)
    found = []
    for kernel, function in ((peer, exllamav3.linear), ("native", linear.linear)):

        def call(index: int, function: Any = function) -> torch.Tensor:
            output: torch.Tensor = function(x, copies.trellis[index], copies.suh, copies.svh, None, copies.layout)
            return output

        for index in range(copies.copies):  # exllamav3 tunes itself and makes its layers at the first calls
            call(index)
        error = relative(call(0), expected)
        us = replayed(call, copies.copies)
        found.append(
            {
                "kernel": kernel, "subject": "backend", "in": shape[0], "out": shape[1], "m": rows,
                "bits": half_bits / 2, "codebook": codebook.label, "us": round(us, 3), "error": error,
            }
        )  # fmt: skip
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if reason := exllamav3.unavailable():
        sys.exit(reason)
    rows: list[Row] = []
    buffer = random_trellis(300_000_000)
    with torch.inference_mode():
        for shape in SHAPES:
            for codebook, half_bits in KINDS:
                for count in ROWS:
                    found = measure(shape, codebook, half_bits, count, buffer)
                    rows += found
                    for row in found:
                        print(
                            shape, codebook.label, half_bits / 2, count, row["kernel"], row["us"], f"{row['error']:.0e}"
                        )
                    sys.stdout.flush()
                if arguments.out:
                    write_results(arguments.out, rows, machine="h200", command="python benchmarks/gpu_exllamav3.py")


if __name__ == "__main__":
    main()
