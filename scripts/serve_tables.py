"""The measured part of docs/serving.md, from benchmarks/results/h200/serve.json."""

from typing import Any

__all__ = ["KINDS", "serve_tables"]

Row = dict[str, Any]
KINDS = {
    "native": "EXL3, 4 bits, head 6",
    "native_fast": "the same, fast mode",
    "marlin_int4": "int4 (GPTQ, Marlin)",
    "vllm_fp8": "FP8",
    "cublas_bf16": "bf16",
}
"""What tables call the weights that rows' kernels serve, in their order."""
_PARTS = ("linears", "attention", "compiled", "rest")


_LOAD = {"read": "reading alone", "weights": "weights", "check": "check", "build": "build", "finish": "finish"}


def serve_tables(results: dict[str, Any]) -> str:
    """What a decoding step of a whole model consists of, and what loading it takes."""
    loads = [row for row in results["rows"] if row["subject"] == "load"]
    return "\n".join((_steps(results), *([_loading(loads)] if loads else [])))


def _steps(results: dict[str, Any]) -> str:
    rows = [row for row in results["rows"] if row["subject"] == "decode"]
    lines = [
        "| sequences | weights | tokens/s | step, µs | linears | attention | compiled | rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["m"], list(KINDS).index(row["kernel"]))):
        parts = row.get("parts_us", {"linears": row["linear_us"]})
        texts = [f"{parts[part]:,.0f}" if part in parts else "" for part in _PARTS]
        cells = [str(row["m"]), KINDS[row["kernel"]], f"{row['tokens_per_second']:,.0f}", f"{row['us']:,.0f}", *texts]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _loading(rows: list[Row]) -> str:
    """Loading, beside a 16-bit model of as many bytes."""
    lines = [
        "Seconds of loading the same model, and one of as many bytes in 16 bits, from the page cache",
        "(`benchmarks/gpu_load.py`, which says what each is):",
        "",
        "| weights | GB | " + " | ".join(_LOAD.values()) + " | vLLM's loader in all |",
        "|---|" + "---|" * (2 + len(_LOAD)),
    ]
    for row in rows:
        texts = [f"{row[f'{stage}_s']:.2f}" for stage in (*_LOAD, "load")]
        lines.append("| " + " | ".join((KINDS[row["kernel"]], f"{row['bytes'] / 1e9:.2f}", *texts)) + " |")
    return "\n".join(lines) + "\n"
