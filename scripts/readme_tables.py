"""Writes the measured parts of README.md and of pages in docs/ from benchmarks/results.

``--check`` only says whether they are current.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kv_tables import kv_tables
from serve_tables import serve_tables

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: made by `make docs` -->\n", "<!-- end of measured -->\n"
SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672))
TOKENS = (1, 8, 128)
_READ_GBPS = 4400
"""What the GPU's memory was measured to deliver to a kernel that only reads."""


def load(name: str) -> dict[str, Any]:
    """One results file."""
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return content


def gpu_table() -> str:
    """One linear on the GPU beside exllamav3's kernels and a 16-bit layer."""
    results = load("h200/linear.json")
    peers = {
        "vllm-exl3": ("native",),
        "exllamav3, its better mode": ("exllamav3", "exllamav3_fp16"),
        "16 bits, cuBLAS": ("cublas_bf16",),
    }
    lines = ["| in × out | tokens | " + " | ".join(peers) + " |", "|---|---|" + "---|" * len(peers)]
    for rows, columns in SHAPES:
        for tokens in TOKENS:
            times = [
                min(
                    row["us"]
                    for row in results["rows"]
                    if (row["in"], row["out"], row["m"]) == (rows, columns, tokens)
                    and row["kernel"] in kernels
                    and (row["kernel"] == "cublas_bf16" or (row["bits"], row["codebook"]) == (4, "mul1"))
                )
                for kernels in peers.values()
            ]
            lines.append(f"| {rows} × {columns} | {tokens} | " + " | ".join(f"{time:.1f}" for time in times) + " |")
    head = (
        f"One linear at 4 bits, codebook mul1, on an {results['meta']['gpu']}, µs "
        "([how](docs/kernels-gpu.md), `benchmarks/results/h200/linear.json`):"
    )
    return _wrapped(head) + "\n" + "\n".join(lines) + "\n"


def serve_line() -> str:
    """A whole model on the GPU: decoding, and the first token of a prompt."""
    results = [row for row in load("h200/serve.json")["rows"] if row["subject"] in ("decode", "first_token")]
    kernels = ("native", "cublas_bf16")
    rows = {(row["subject"], row["kernel"], row["m"]): row for row in results}
    batches, prompts = (
        sorted({size for subject, _, size in rows if subject == wanted}) for wanted in ("decode", "first_token")
    )
    speeds = [", ".join(f"{rows['decode', kernel, m]['tokens_per_second']:.0f}" for m in batches) for kernel in kernels]
    # Rows that a later run of other subjects kept name the commit that they were measured at.
    earlier = ", with the kernels of an earlier version" if any("commit" in row for row in results) else ""
    text = (
        "A model of the shape of Llama 3 8B with random weights, served by vLLM on the same GPU, decodes (tokens/s at "
        f"batches of {', '.join(map(str, batches))}) {speeds[0]} at 4 bits with a 6-bit head, and {speeds[1]} in 16 "
        "bits"
    )
    if prompts:
        waits = [", ".join(f"{rows['first_token', kernel, m]['us'] / 1e3:.0f}" for m in prompts) for kernel in kernels]
        text += (
            f"; the first token of a prompt of {', '.join(map(str, prompts))} tokens comes after {waits[0]} ms, and "
            f"{waits[1]} in 16 bits"
        )
    return _wrapped(f"{text} (`benchmarks/results/h200/serve.json`{earlier}).")


def prefill_line() -> str:
    """Prompts: linears of many tokens beside cuBLAS, in the same run."""
    rows = load("h200/prefill.json")["rows"]
    texts = []
    for low, high in ((128, 512), (1024, 8192)):
        ratios = [
            row["bf16_us"] / row["us"]
            for row in rows
            if row["kernel"] == "native" and (row["bits"], row["codebook"]) == (4, "mul1")
            and low <= row["m"] <= high and row["m"].bit_count() == 1
        ]  # fmt: skip
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        texts.append(f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) at {low} to {high} tokens")
    return _wrapped(
        "Prompts on the same GPU: linears of five shapes at 4 bits run at this speed relative to cuBLAS in bf16, "
        f"geometric mean and range: {'; '.join(texts)} (`benchmarks/results/h200/prefill.json`)."
    )


def moe_line() -> str:
    """Routed experts beside vLLM's own in 16 bits."""
    rows = load("h200/moe.json")["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows if row["kernel"] == "vllm_bf16"))
    times: dict[tuple[str, str, int], float] = {}
    for row in (row for row in rows if "us" in row):  # others say whether there are cliffs
        cell = (row["kernel"], row["shape"], row["m"])
        times[cell] = min(row["us"], times.get(cell, math.inf))
    texts = []
    for tokens in (1, 8, 64, 512, 8192):
        ratios = [times["vllm_bf16", shape, tokens] / times["native", shape, tokens] for shape in shapes]
        texts.append(f"{min(ratios):.1f} to {max(ratios):.1f} at {tokens}")
    return _wrapped(
        f"Routed experts on the same GPU ({'; '.join(shapes)}) run at this speed relative to vLLM's own in bf16: "
        f"{', '.join(texts)} tokens (`benchmarks/results/h200/moe.json`)."
    )


def cpu_line() -> str:
    """One linear on the CPU beside torch's 16-bit one, how near logits are to exllamav3's, and memory."""
    results = load("cpu/cpu_linear.json")
    rows = [row for row in results["rows"] if row.get("in") == 4096 and row.get("out") == 14336 and "us" in row]
    peer = {row["m"]: row["us"] for row in rows if row["kernel"] == "torch_bf16"}
    ours = {row["m"]: row["us"] for row in rows if (row.get("bits"), row.get("codebook")) == (4, "mul1")}
    speed = ", ".join(f"{peer[tokens] / ours[tokens]:.1f} at {tokens}" for tokens in (1, 16, 128))
    logits = [row["error"] for row in load("cpu/golden.json")["rows"] if row["subject"] == "logits"]
    memory = [row["peak_over_pack"] for row in load("cpu/memory.json")["rows"] if row["subject"] == "load"]
    return _wrapped(
        f"On two cores of an {results['meta']['cpu']}, a 4096 × 14336 linear at 4 bits has this speed relative to "
        f"torch's bf16 one: {speed} tokens (`cpu_linear.json`). Logits of the {len(logits)} dense packs made by "
        f"exllamav3 differ from its own by {min(logits):.1e} to {max(logits):.1e} relative (`golden.json`). Loading "
        f"takes at most {max(memory):.2f} times the pack in memory (`memory.json`; all in `benchmarks/results/cpu/`)."
    )


def demo_line() -> str:
    """What the demo recorded."""
    results = load("cpu/demo.json")
    row, meta = results["rows"][-1], results["meta"]
    return _wrapped(
        f"The demo on two cores of an {meta['cpu']}: {row['tokens_per_second']:.0f} tokens/s, and logits "
        f"{row['kl']:.3f} nats a token (KL) from the 16-bit model's at {row['bits']:g} bits, without calibration "
        "(`benchmarks/results/cpu/demo.json`)."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


Cell = tuple[int, int, float, str, int]
"""in, out, bits, codebook, tokens."""


def _linears() -> tuple[dict[Cell, float], dict[Cell, float], dict[tuple[int, int, int], float]]:
    """Microseconds of our linears, of exllamav3's better mode, and of cuBLAS by (in, out, tokens)."""
    ours: dict[Cell, float] = {}
    peer: dict[Cell, float] = {}
    dense = {}
    for row in load("h200/linear.json")["rows"]:
        if row["kernel"] == "cublas_bf16":
            dense[row["in"], row["out"], row["m"]] = row["us"]
            continue
        cell = (row["in"], row["out"], row["bits"], row["codebook"], row["m"])
        target = ours if row["kernel"] == "native" else peer
        target[cell] = min(row["us"], target.get(cell, math.inf))
    return ours, peer, dense


def linear_tables() -> str:
    """Every shape at 4 bits, and how all cells compare with exllamav3."""
    ours, peer, dense = _linears()
    shapes = sorted({cell[:2] for cell in ours}, key=lambda shape: (shape[0] * shape[1], shape[0]))
    tokens = sorted({cell[4] for cell in ours})
    lines = [
        "mul1, K = 4, µs (times as fast as exllamav3 / as cuBLAS bf16; – where that was not timed):",
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
        "Times as fast as exllamav3's better mode, over all shapes and bit rates that both were timed at: least, "
        "geometric mean (cells).",
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
        _wrapped(f"Share of {_READ_GBPS / 1e3:.1f} TB/s on {large[0]}×{large[1]} at M = 1: {', '.join(shares)}."),
        *marlin_lines(),
    ]
    return "\n".join(lines)


def marlin_lines() -> list[str]:
    """vLLM's own int4 linear beside ours, in one process."""
    results = load("h200/marlin.json")
    times = {(row["kernel"], row["in"], row["out"], row["m"]): row["us"] for row in results["rows"]}
    tokens = sorted({cell[3] for cell in times})
    lines = [
        _wrapped(
            "vLLM's own int4 linear (Marlin, 16-bit activations, groups of 128), µs, and times as fast as it that mul1 "
            f"at K = 4 is, in one process with the kernels of {results['meta']['date']} "
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


def readme_part() -> str:
    """The measured part of README.md."""
    return "\n".join((gpu_table(), prefill_line(), moe_line(), serve_line(), cpu_line(), demo_line()))


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme_part,
    "docs/kernels-gpu.md": linear_tables,
    "docs/kv-cache.md": lambda: kv_tables(load("h200/kv.json")),
    "docs/serving.md": lambda: serve_tables(load("h200/serve.json")),
}


def page(name: str) -> str:
    """A page with its measured part made anew."""
    text = (ROOT / name).read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{name} lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{after}"


def main() -> int:
    """Write the parts, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description=f"Write the measured parts of {', '.join(PAGES)}.")
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    only_check = parser.parse_args().check
    stale = [name for name in PAGES if page(name) != (ROOT / name).read_text(encoding="utf-8")]
    if only_check:
        print(f"out of date: {', '.join(stale)}: run `make docs`" if stale else "the measured parts are current")
        return bool(stale)
    for name in stale:
        (ROOT / name).write_text(page(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
