"""The tables of docs/kernels-gpu.md that benchmarks/results/h200/gemm.json gives: 8 to 512 tokens a step."""

import math
from collections.abc import Callable
from typing import Any

from linear_tables import wrapped

__all__ = ["gemm_tables"]


def gemm_tables(results: dict[str, Any]) -> str:
    """Single layers at 4 bits, other kinds relative to cuBLAS, and fused layers as vLLM calls them."""
    rows = [row for row in results["rows"] if row["kernel"] == "native"]
    single = [row for row in rows if "parts" not in row]
    return "\n".join(
        [
            wrapped(
                "From 8 tokens on, what dispatch picks in one run with cuBLAS (`benchmarks/results/h200/gemm.json`, "
                f"written by `benchmarks/gpu_gemm.py` on {results['meta']['date']}). µs for mul1 with K = 4 (in "
                "brackets: speed relative to cuBLAS in bf16):"
            ),
            *_table("in×out", [row for row in single if (row["bits"], row["codebook"]) == (4, "mul1")], _single_name),
            "",
            "Layers of several parts, in one call as vLLM has them, and cuBLAS with one weight of their size:",
            "",
            *_table("layer", [row for row in rows if "parts" in row], _fused_name),
            "",
            "Other kinds, geometric mean of the speed relative to cuBLAS in bf16 over the layers of the first table:",
            "",
            *_kinds(single),
        ]
    )


def _single_name(row: dict[str, Any]) -> str:
    return f"{row['in']}×{row['out']}"


def _fused_name(row: dict[str, Any]) -> str:
    return f"{row['in']}×({' + '.join(map(str, row['parts']))})"


def _table(head: str, rows: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> list[str]:
    """A line a layer, a column a number of tokens."""
    tokens = sorted({row["m"] for row in rows})
    lines = [f"| {head} | " + " | ".join(f"M={count}" for count in tokens) + " |", "|---|" + "---|" * len(tokens)]
    for layer in dict.fromkeys(name(row) for row in rows):
        cells = {row["m"]: row for row in rows if name(row) == layer}
        texts = [f"{cells[m]['now_us']:.1f} ({cells[m]['bf16_us'] / cells[m]['now_us']:.2f})" for m in tokens]
        lines.append(f"| {layer} | " + " | ".join(texts) + " |")
    return lines


def _kinds(rows: list[dict[str, Any]]) -> list[str]:
    tokens = sorted({row["m"] for row in rows})
    lines = ["| kind | " + " | ".join(f"M={count}" for count in tokens) + " |", "|---|" + "---|" * len(tokens)]
    for bits, codebook in sorted({(row["bits"], row["codebook"]) for row in rows}, key=lambda kind: (kind[1], kind[0])):
        means = []
        for count in tokens:
            ratios = [
                row["bf16_us"] / row["now_us"]
                for row in rows
                if (row["bits"], row["codebook"], row["m"]) == (bits, codebook, count)
            ]
            means.append(f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
        lines.append(f"| {codebook}, K = {bits:g} | " + " | ".join(means) + " |")
    return lines
