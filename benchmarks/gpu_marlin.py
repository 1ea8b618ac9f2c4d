#!/usr/bin/env python3
"""vLLM's own int4 linear (Marlin, W4A16, groups of 128) beside the native kernels at the same bits a weight.

    python benchmarks/gpu_marlin.py [--library FILE] [--rows M ...] [--out FILE]

Replayed graphs on float16 input, weight copies rotated beyond the L2. Marlin's repacked weights are random, and so are
the scales of its groups: only time is compared. ``--library`` names vLLM's ``_C_stable_libtorch.abi3.so`` where vLLM
itself cannot be imported.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch

from vllm_exl3.cuda.timing import linear_us, replayed
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import write_results

SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672))
ROWS = (1, 4, 8, 16, 32, 64, 128)
GROUP = 128
ROTATED_BYTES = 320e6
UINT4_BIAS_8 = 4 << 8 | 8 << 17 | 1 << 50
"""vLLM's number of a type: four unsigned bits, eight subtracted, no NaN."""
Row = dict[str, Any]


class Marlin:
    """Weight copies of one shape.

    Args:
        shape: in and out features.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.inputs, self.outputs = shape
        words = (self.inputs // 16, self.outputs * 2)
        self.copies = max(3, min(64, math.ceil(ROTATED_BYTES / (4 * words[0] * words[1]))))
        self.weights = [
            torch.randint(-(2**31), 2**31, words, device="cuda", dtype=torch.int32) for _ in range(self.copies)
        ]
        self.scales = torch.rand(self.inputs // GROUP, self.outputs, device="cuda").half() * 0.01
        self.locks = torch.zeros(
            4 * torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int32, device="cuda"
        )

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[M, in]`` by one copy, as vLLM calls it."""
        output: torch.Tensor = torch.ops._C.marlin_gemm(
            x, None, weight, None, self.scales, None, None, None, self.locks, UINT4_BIAS_8,
            x.shape[0], self.outputs, self.inputs, False, True, False,
        )  # fmt: skip
        return output

    def check(self) -> None:
        """Known weights: the product must be that of the numbers which were packed.

        Raises:
            RuntimeError: it is not, so that the time would be of something else.
        """
        numbers = torch.randint(0, 16, (self.inputs, self.outputs), device="cuda", dtype=torch.int32)
        shifts = torch.arange(0, 32, 4, device="cuda", dtype=torch.int32)[None, :, None]
        packed = (numbers.view(-1, 8, self.outputs) << shifts).sum(1, dtype=torch.int32)
        weight = torch.ops._C.gptq_marlin_repack(packed, self.inputs, self.outputs, 4, False)
        scales, self.scales = self.scales, torch.full_like(self.scales, 0.01)
        x = torch.randn(3, self.inputs, device="cuda").half()
        expected = x.double() @ ((numbers - 8).double() * self.scales[0, 0].double())
        error = ((self.multiply(x, weight).double() - expected).norm() / expected.norm()).item()
        self.scales = scales
        if not error < 2e-3:
            raise RuntimeError(f"Marlin's product of known weights is off by {error:.1e}")


def measure(shape: tuple[int, int], marlin: Marlin, rows: int) -> list[Row]:
    """A row for Marlin and one for the native kernels."""
    x = torch.randn(rows, shape[0], device="cuda", dtype=torch.float16)
    times = {
        "marlin_int4": replayed(lambda index: marlin.multiply(x, marlin.weights[index]), marlin.copies),
        "native": linear_us(shape, 8, Codebook.MUL1, rows),
    }
    return [
        {"kernel": kernel, "in": shape[0], "out": shape[1], "m": rows, "bits": 4, "us": round(us, 3)}
        | ({"codebook": "mul1"} if kernel == "native" else {"group": GROUP})
        for kernel, us in times.items()
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="vLLM's library, where vLLM is not installed")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="tokens")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.library is not None:
        torch.ops.load_library(str(arguments.library))
    else:
        import vllm._custom_ops  # noqa: F401  registers the operators
    if not hasattr(torch.ops._C, "marlin_gemm"):
        sys.exit("no marlin_gemm among vLLM's operators; name the library with --library")
    rows: list[Row] = []
    with torch.inference_mode():
        for shape in SHAPES:
            marlin = Marlin(shape)
            marlin.check()
            line = []
            for count in arguments.rows:
                theirs, ours = measure(shape, marlin, count)
                rows += [theirs, ours]
                line.append(f"{count}: {theirs['us']:.1f}/{ours['us']:.1f}={theirs['us'] / ours['us']:.2f}")
            print(shape, "  ".join(line), flush=True)
            if arguments.out:
                write_results(
                    arguments.out,
                    rows,
                    machine="h200",
                    command="python benchmarks/gpu_marlin.py",
                    replaces=lambda row: row["m"] in arguments.rows,
                )
            del marlin


if __name__ == "__main__":
    main()
