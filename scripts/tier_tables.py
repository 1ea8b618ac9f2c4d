"""The measured part of docs/offload.md: routed experts by tier, whole models and the op alone."""

from typing import Any

from linear_tables import wrapped

__all__ = ["tier_tables"]

Row = dict[str, Any]


def tier_tables(results: dict[str, Any]) -> str:
    """Tokens a second of whole models, and µs of one layer's experts under Zipf's law."""
    rows, meta = results["rows"], results["meta"]
    bus = next(row["gbps"] for row in rows if row["subject"] == "bus")
    head = (
        f"On an {meta['gpu']} with {meta['threads']} processors, {meta['date']} (`benchmarks/gpu_tiers.py`, "
        f"`benchmarks/results/h200/tiers.json`); copies over the bus reach {bus:.1f} GB/s there. A model of 8 layers "
        "of 128 experts of 2048×768, 8 of them a token, at 4 bits with random weights, tokens a second decoded (what "
        "one sequence needs of the experts in host memory depends on its tokens more than the others do):"
    )
    decode = [row for row in rows if row["subject"] == "decode"]
    batches = sorted({row["m"] for row in decode})
    lines = _table(["tier", "on the GPU", *(f"batch {m}" for m in batches), "tokens equal to the GPU's alone"])
    for pack, tier, share in dict.fromkeys((row["pack"], row["tier"], row["resident"]) for row in decode):
        found = [row for row in decode if (row["pack"], row["tier"], row["resident"]) == (pack, tier, share)]
        speeds = {row["m"]: row["tokens_per_s"] for row in found}
        equal = "yes" if all(row["tokens_equal"] for row in found) else "no"
        lines.append(_line([f"`{tier}`", f"{share:.0%}", *(f"{speeds[m]:,.0f}" for m in batches), equal]))
    return "\n".join([wrapped(head), *lines, "", *_op(rows)])


def _op(rows: list[Row]) -> list[str]:
    op = [row for row in rows if row["subject"] == "op" and row["routing"] == "zipf"]
    batches = sorted({row["m"] for row in op})
    head = (
        "The experts of one such layer alone, routed by Zipf's law (exponent 1) with the most used ones on the GPU, µs "
        "(and GB/s of host memory):"
    )
    lines = _table(["on the GPU", "tier", *(f"{m} tokens" for m in batches)])
    for share, tier in dict.fromkeys((row["resident"], row["tier"]) for row in op):
        cells = {row["m"]: row for row in op if (row["resident"], row["tier"]) == (share, tier)}
        shown = [
            f"{row['us']:.0f}" + (f" ({row['gbps']:.0f})" if row["gbps"] else "")
            for row in map(cells.get, batches)
            if row
        ]
        lines.append(_line([f"{share:.0%}", f"`{tier}`" if share < 1 else "", *shown]))
    return [wrapped(head), *lines, ""]


def _table(heads: list[str]) -> list[str]:
    return [_line(heads), "|" + "---|" * len(heads)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
