"""The measured part of docs/kernels-gpu.md, from benchmarks/results/h200: linear.json and marlin.json."""

import math
import textwrap
from typing import Any

__all__ = ["linear_tables", "marlin_times", "wrapped"]

_READ_GBPS = 4400
"""What the GPU's memory was measured to deliver to a kernel that only reads."""


def wrapped(text: str) -> str:
    """A paragraph of at most 120 characters a line."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


Cell = tuple[int, int, float, str, int]
"""in, out, bits, codebook, tokens."""


def _linears(
    results: dict[str, Any],
) -> tuple[dict[Cell, float], dict[Cell, float], dict[tuple[int, int, int], float]]:
    """Microseconds of our linears, of exllamav3's better mode, and of cuBLAS by (in, out, tokens)."""
    ours: dict[Cell, float] = {}
    peer: dict[Cell, float] = {}
    dense = {}
    for row in results["rows"]:
        if row["kernel"] == "cublas_bf16":
            dense[row["in"], row["out"], row["m"]] = row["us"]
            continue
        cell = (row["in"], row["out"], row["bits"], row["codebook"], row["m"])
        target = ours if row["kernel"] == "native" else peer
        target[cell] = min(row["us"], target.get(cell, math.inf))
    return ours, peer, dense


def linear_tables(results: dict[str, Any], marlin: dict[str, Any]) -> str:
    """Every shape at 4 bits, and how all cells compare with exllamav3."""
    ours, peer, dense = _linears(results)
    shapes = sorted({cell[:2] for cell in ours}, key=lambda shape: (shape[0] * shape[1], shape[0]))
    tokens = sorted({cell[4] for cell in ours})
    lines = [
        "µs for mul1 with K = 4 (in brackets: speed relative to exllamav3 / to cuBLAS in bf16; –: not timed):",
        "",
        "| in×out | " + " | ".join(f"M={count}" for count in tokens) + " |",
        "|---|" + "---|" * len(tokens),
    ]
    for shape in shapes:
        texts = []
        for count in tokens:
            cell: Cell = (*shape, 4, "mul1", count)
            other = f"{peer[cell] / ours[cell]:.2f}" if cell in peer else "–"
            texts.append(f"{ours[cell]:.1f} ({other} / {dense[*shape, count] / ours[cell]:.2f})")
        lines.append(f"| {shape[0]}×{shape[1]} | " + " | ".join(texts) + " |")
    lines += [
        "",
        "Speed relative to exllamav3's faster mode, over all shapes and bit rates for which both were timed: minimum, "
        "geometric mean (number of cells).",
        "",
        "| codebook | M = 1–2 | 4–8 | 16 | 32–128 |",
        "|---|---|---|---|---|",
    ]
    for codebook in ("mul1", "mcg", "3inst"):
        texts = []
        for low, high in ((1, 2), (4, 8), (16, 16), (32, 128)):
            ratios = [
                peer[cell] / ours[cell]
                for cell in ours
                if cell in peer and cell[3] == codebook and low <= cell[4] <= high
            ]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0
            texts.append(f"{min(ratios):.2f}, {mean:.2f} ({len(ratios)})" if ratios else "–")
        lines.append(f"| {codebook} | " + " | ".join(texts) + " |")
    large = max(shapes, key=lambda shape: shape[0] * shape[1])
    shares = []
    for bits in sorted({cell[2] for cell in ours if cell[3] == "mul1"}):
        us = ours[*large, bits, "mul1", 1]
        shares.append(f"{large[0] * large[1] * bits / 8e3 / us / _READ_GBPS:.0%} at K = {bits:g}")
    lines += [
        "",
        wrapped(f"Share of {_READ_GBPS / 1e3:.1f} TB/s on {large[0]}×{large[1]} at M = 1: {', '.join(shares)}."),
        *_marlin_lines(marlin),
    ]
    return "\n".join(lines)


def marlin_times(results: dict[str, Any]) -> dict[tuple[str, int, int, int], float]:
    """Microseconds by (kernel, in, out, tokens)."""
    return {(row["kernel"], row["in"], row["out"], row["m"]): row["us"] for row in results["rows"]}


def _marlin_lines(results: dict[str, Any]) -> list[str]:
    """vLLM's own int4 linear beside ours, in one process."""
    times = marlin_times(results)
    tokens = sorted({cell[3] for cell in times})
    lines = [
        wrapped(
            "µs for vLLM's own int4 linear (Marlin, 16-bit activations, groups of 128); in brackets, the speed of mul1 "
            "at K = 4 relative to it, measured in the same process with this package's kernels of "
            f"{results['meta']['date']} "
            "(`benchmarks/results/h200/marlin.json`):"
        ),
        "| in×out | " + " | ".join(f"M={count}" for count in tokens) + " |",
        "|---|" + "---|" * len(tokens),
    ]
    for shape in sorted({cell[1:3] for cell in times}):
        cells = [(times["marlin_int4", *shape, m], times["native", *shape, m]) for m in tokens]
        texts = [f"{theirs:.1f} ({theirs / ours:.2f})" for theirs, ours in cells]
        lines.append(f"| {shape[0]}×{shape[1]} | " + " | ".join(texts) + " |")
    return lines
