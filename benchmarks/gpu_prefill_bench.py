"""Base classes of gpu_gemm.py, gpu_prefill.py and gpu_prefill_int8.py: shapes, cells, rows, the time limit."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.timing import Rotation, bound_us, dense_weights, random_trellis
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.results import write_results

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))

_SAVED_EVERY = 6.0
"""Seconds after which rows are written: a run may be cut."""

Row = dict[str, object]


class Bench:
    """Keeps a row of each linear that is timed.

    Args:
        arguments: the command line's: ``shapes``, ``seconds``, ``out``.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows: list[Row] = []
        self._buffer = random_trellis(600_000_000)
        self._started = self._saved = time.perf_counter()
        self._device = runtime.device(torch.cuda.current_device())
        self.limits = self._device.limits

    def prepare(self, wanted: Iterable[Instance]) -> None:
        """Compile all kernels that will be timed, in parallel."""
        self._device.prepare(list(wanted))
        print(f"compiled after {time.perf_counter() - self._started:.1f} s", flush=True)

    def cells(
        self, kinds: Iterable[tuple[float, int]], rows: Iterable[int], shapes: Iterable[tuple[int, int]] | None = None
    ) -> Iterator[tuple[Rotation, int]]:
        """(weights, tokens) of every cell of these (K, codebook), until the time is over."""
        for bits, codebook in kinds:
            for shape in shapes or self.arguments.shapes:
                rotation = Rotation(shape, round(2 * bits), codebook, self._buffer)
                for count in rows:
                    if time.perf_counter() - self._started > self.arguments.seconds:
                        print("out of time", flush=True)
                        return
                    yield rotation, count
                if time.perf_counter() - self._saved > _SAVED_EVERY:
                    self.save()

    def keep(
        self, kernel: str, rotation: Rotation, rows: int, mode: str, us: float, loop: float | None, **more: object
    ) -> None:
        """Add a row.

        Args:
            kernel: its name in the results.
            rotation: the weights.
            rows: tokens.
            mode: what served them.
            us: median microseconds.
            loop: rate of a loop without loads, in 1e12 operations a second; None: state no limit.
            more: further columns.
        """
        shard = rotation.shard
        shape = (shard.in_features, shard.out_features)
        row: Row = {
            "kernel": kernel, "in": shape[0], "out": shape[1], "m": rows, "bits": shard.half_bits / 2,
            "codebook": Codebook(shard.codebook).label, "mode": mode, "us": round(us, 2), **more,
            "tflops": tflops(shape, rows, us),
        }  # fmt: skip
        if loop is not None:
            count = shape[0] * shape[1]
            without_products = bound_us(count * shard.half_bits / 16, count, 0)
            row["limit_us"] = round(max(without_products, 2e-6 * count * rows / loop), 2)
        self.rows.append(row)

    def further_rows(self) -> list[Row]:
        """Rows of what was measured beside the linears."""
        return []

    def save(self) -> None:
        """Write what was measured so far."""
        if self.arguments.out is None or not self.rows:
            return
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        facts = {"multiprocessors": multiprocessors, "cuda": torch.version.cuda}
        command, rows = "python " + " ".join(sys.argv), [*self.rows, *self.further_rows()]
        write_results(self.arguments.out, rows, machine="h200", command=command, facts=facts)
        self._saved = time.perf_counter()


class CublasBench(Bench):
    """Times cuBLAS in bf16 for the same shapes as well.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self._dense: tuple[tuple[int, int], list[torch.Tensor]] | None = None
        self._bf16: dict[tuple[int, int, int], list[float]] = {}

    def dense(self, shape: tuple[int, int], rows: int) -> tuple[Callable[[int], object], int]:
        """cuBLAS in bf16, and how many weight copies it has."""
        if self._dense is None or self._dense[0] != shape:
            self._dense = None  # frees the shape's before
            self._dense = shape, dense_weights(shape)
        weights, x = self._dense[1], torch.randn(rows, shape[0], device="cuda", dtype=torch.bfloat16)
        return lambda i: torch.nn.functional.linear(x, weights[i]), len(weights)

    def note_bf16(self, shape: tuple[int, int], rows: int, us: float) -> None:
        """Keep a time of cuBLAS for `further_rows`."""
        self._bf16.setdefault((*shape, rows), []).append(us)

    def further_rows(self) -> list[Row]:
        """A row of cuBLAS for each shape and number of tokens: the median of all its times."""
        return [
            {"kernel": "cublas_bf16", "in": width, "out": height, "m": rows, "us": round(us, 2),
             "tflops": tflops((width, height), rows, us)}
            for (width, height, rows), times in self._bf16.items()
            for us in [statistics.median(times)]
        ]  # fmt: skip


def tflops(shape: tuple[int, int], rows: int, us: float) -> float:
    """Rate of a linear of (in, out) features that takes ``us`` microseconds, in 1e12 operations a second."""
    return round(2e-6 * shape[0] * shape[1] * rows / us, 1)
