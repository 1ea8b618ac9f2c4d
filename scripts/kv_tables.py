"""The measured part of docs/kv-cache.md, from benchmarks/results/h200/kv.json."""

from collections.abc import Iterable
from typing import Any

__all__ = ["kv_tables"]

Row = dict[str, Any]
_LAYER = {
    "int4": "int4, this package",
    "fp8_fa3": "fp8, FlashAttention 3",
    "fp8_triton": "fp8, Triton",
    "stock_int4": "int4, vLLM's own",
}
_ENGINE = {"int4": "int4, this package", "fp8": "fp8, FlashAttention 3", "stock": "int4, vLLM's own"}


def kv_tables(results: dict[str, Any]) -> str:
    """Decoding, prefill, whole engines and logits."""
    rows: list[Row] = results["rows"]
    meta = results["meta"]
    parts = [
        f"{meta['gpu']}, vLLM {meta['versions']['vllm']}, Triton {meta['versions']['triton']}, {meta['date']}; "
        "`benchmarks/results/h200/kv.json`.",
        "",
        *_decoding([row for row in rows if row["subject"] == "decode"]),
        *_prefill([row for row in rows if row["subject"] == "prefill"]),
        *_engines([row for row in rows if row["subject"] == "serve"]),
        *_logits([row for row in rows if row["subject"] == "logits"]),
    ]
    return "\n".join(parts)


def _table(heads: list[str], lines: Iterable[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(x) + " |" for x in lines),
        "",
    ]


def _cells(rows: list[Row]) -> tuple[dict[tuple[int, int, int], dict[str, Row]], list[str]]:
    """Rows by context, batch and query tokens, and the kernels in the order of `_LAYER`."""
    cells: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["context"], row["batch"], row["query"]), {})[row["kernel"]] = row
    return cells, [kernel for kernel in _LAYER if any(row["kernel"] == kernel for row in rows)]


def _errors(rows: list[Row], kernels: list[str]) -> str:
    worst = (
        f"{_LAYER[kernel]}: {max(row['error'] for row in rows if row['kernel'] == kernel):.1e}" for kernel in kernels
    )
    return f"Largest relative error against float64 over the same cache: {'; '.join(worst)}."


def _decoding(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    cells, kernels = _cells(rows)
    lines = []
    for (context, batch, query), found in cells.items():
        ours = found["int4"]
        times = [f"{found[kernel]['us']:,.0f}" if kernel in found else "" for kernel in kernels]
        times[0] += f" ({ours['us'] / ours['byte_us']:.2f})"
        lines.append([f"{context:,}", str(batch), str(query), *times])
    heads = ["tokens in the cache", "requests", "query tokens", *(_LAYER[kernel] for kernel in kernels)]
    return [
        "Time of decoding in one layer with 24 query heads and 4 KV heads of size 256, in µs; in brackets, relative to "
        "the time of copying as many bytes.",
        "",
        *_table(heads, lines),
        _errors(rows, kernels),
        "",
    ]


def _prefill(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    cells, kernels = _cells(rows)
    lines = [
        [f"{query:,} over {context:,}", *(_ms(found[kernel]) if kernel in found else "" for kernel in kernels)]
        for (context, _, query), found in cells.items()
    ]
    heads = ["query tokens", *(_LAYER[kernel] for kernel in kernels)]
    return ["Time of prefilling a chunk in one layer, in ms:", "", *_table(heads, lines), _errors(rows, kernels), ""]


def _ms(row: Row) -> str:
    return f"{row['us'] / 1e3:.1f}"


def _engines(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    kinds = [kind for kind in _ENGINE if any(row["kernel"] == kind for row in rows)]
    found = {(row["mode"], row["what"], row["kernel"]): row["tokens_per_second"] for row in rows}
    lines = [
        [
            f"{what}, {mode}",
            *(f"{found[mode, what, kind]:,.0f}" if (mode, what, kind) in found else "" for kind in kinds),
        ]
        for mode, what in dict.fromkeys((row["mode"], row["what"]) for row in rows)
    ]
    tokens = f"{rows[0]['tokens']:,}"
    return [
        f"Tokens/s of vLLM with four such layers and a prompt of {tokens} tokens (drafts, where named, have one token "
        "and are all accepted):",
        "",
        *_table(["", *(_ENGINE[kind] for kind in kinds)], lines),
    ]


def _logits(rows: list[Row]) -> list[str]:
    lines = [
        f"* {row['pack']}, {row['tokens']:,} tokens, {_ENGINE[row['kernel']]}, against a 16-bit cache: "
        f"KL divergence {row['kl']:.1e}; {row['equal_tokens']} of {row['all_tokens']} greedy tokens are equal; of "
        f"{row['all_needles']} questions about a fact hidden in the context, {row['equal_needles']} get equal answers."
        for row in rows
    ]
    return [*lines, ""] if lines else []
