"""The measured part of docs/serving.md, from benchmarks/results/h200/serve.json."""

from typing import Any

__all__ = ["serve_tables"]

Row = dict[str, Any]
_KINDS = {"native": "4 bits, head 6", "cublas_bf16": "16 bits"}
_PARTS = ("linears", "attention", "compiled", "rest")


def serve_tables(results: dict[str, Any]) -> str:
    """What a decoding step of a whole model consists of."""
    rows = [row for row in results["rows"] if row["subject"] == "decode"]
    lines = [
        "| sequences | weights | tokens/s | step, µs | linears | attention | compiled | rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["m"], row["kernel"] != "native")):
        parts = row.get("parts_us", {"linears": row["linear_us"]})
        texts = [f"{parts[part]:,.0f}" if part in parts else "" for part in _PARTS]
        cells = [str(row["m"]), _KINDS[row["kernel"]], f"{row['tokens_per_second']:,.0f}", f"{row['us']:,.0f}", *texts]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
