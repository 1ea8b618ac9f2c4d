"""Writes the measured parts of README.md and of pages in docs/ from benchmarks/results.

``--check`` only says whether they are current.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from cpu_tables import SETS, cpu_tables, one_token_line
from gemm_tables import gemm_tables
from generated import ROOT, write_or_check
from gpu_tests_table import gpu_tests
from kv_tables import kv_tables
from linear_tables import linear_tables, marlin_times, wrapped
from serve_tables import KINDS, serve_tables
from tier_tables import tier_tables

BEGIN, END = "<!-- measured: made by `make docs` -->\n", "<!-- end of measured -->\n"
SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672))
TOKENS = (1, 8, 128)


def load(name: str) -> dict[str, Any]:
    """One results file."""
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return content


def machines_line() -> str:
    """On what, with what and when all of it was measured."""
    gpu = [load(f"h200/{name}.json")["meta"] for name in ("linear", "serve", "prefill", "moe", "marlin")]
    cpu = [load(f"cpu/{name}.json")["meta"] for name in ("demo", "cpu_linear", "golden", "memory")]
    processors = " or ".join(dict.fromkeys(f"an {meta['cpu']}" for meta in cpu))
    return wrapped(
        f"GPU: one {gpu[0]['gpu']}, driver {gpu[0]['driver']}, CUDA {gpu[0]['cuda']}, {_versions(gpu, 'exllamav3')}. "
        f"CPU: two cores of {processors} (virtual machines), {_versions(cpu)}. Every file named below records "
        "the command and the commit as well."
    )


def _versions(metas: list[dict[str, Any]], *more: str) -> str:
    """Versions of what was measured with, and the days; all results have to agree on a version."""
    texts = []
    for name in ("torch", "vllm", *more):
        found = {version for meta in metas if (version := meta["versions"].get(name)) is not None}
        if len(found) != 1:
            raise SystemExit(f"results were measured with {name} {sorted(found)}: the page names one version")
        texts.append(f"{name.replace('vllm', 'vLLM')} {found.pop()}")
    days = sorted({meta["date"] for meta in metas})
    return f"{', '.join(texts)}, measured on {' and '.join(days)}"


def gpu_table() -> str:
    """One linear on the GPU beside exllamav3's kernels and a 16-bit layer."""
    results = load("h200/linear.json")
    peers = {
        "vllm-exl3": ("native",),
        "exllamav3, the faster of its modes": ("exllamav3", "exllamav3_fp16"),
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
        "Microseconds for one linear at 4 bits with codebook mul1 on the GPU ([how](docs/kernels-gpu.md), "
        "`benchmarks/results/h200/linear.json`):"
    )
    return wrapped(head) + "\n" + "\n".join(lines) + "\n"


def serve_table() -> str:
    """A whole model on the GPU, beside what else vLLM serves: decoding, and the first token of a prompt."""
    results = [row for row in load("h200/serve.json")["rows"] if row["subject"] in ("decode", "first_token")]
    rows = {(row["subject"], row["kernel"], row["m"]): row for row in results}
    batches, prompts = (
        sorted({size for subject, _, size in rows if subject == wanted}) for wanted in ("decode", "first_token")
    )
    # Rows that a later run kept name the commit that they were measured at.
    kept = [kind for kind in KINDS if any("commit" in row for row in results if row["kernel"] == kind)]
    kept = [KINDS[kind] for kind in kept]
    run = "in one run" if not kept else f"{', '.join(kept)} measured earlier"
    head = (
        "A model with the shape of Llama 3 8B and random weights, served by vLLM on the same GPU: tokens per second "
        "decoded at several batch sizes, and milliseconds to the first token after prompts of several lengths "
        f"(`benchmarks/results/h200/serve.json`, {run}):"
    )
    titles = ["weights", *(f"batch {m}" for m in batches), *(f"first token, {m}" for m in prompts)]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for kernel, name in KINDS.items():
        decoded = [f"{rows['decode', kernel, m]['tokens_per_second']:.0f}" for m in batches]
        waited = [f"{rows['first_token', kernel, m]['us'] / 1e3:.1f}" for m in prompts]
        lines.append("| " + " | ".join((name, *decoded, *waited)) + " |")
    return wrapped(head) + "\n" + "\n".join(lines) + "\n"


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
    return wrapped(
        "Prompts on the same GPU: speed of linears at 4 bits relative to cuBLAS in bf16, as the geometric mean (and "
        f"range) over five shapes: {'; '.join(texts)} (`benchmarks/results/h200/prefill.json`)."
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
    return wrapped(
        f"Routed experts on the same GPU ({'; '.join(shapes)}): speed relative to vLLM's Triton kernels in bf16, "
        f"{', '.join(texts)} tokens. vLLM has a tuned configuration for the first shape only "
        "(`benchmarks/results/h200/moe.json`)."
    )


def marlin_line() -> str:
    """vLLM's own int4 linear, which is the nearest rival inside vLLM."""
    times = marlin_times(load("h200/marlin.json"))
    shapes = sorted({cell[1:3] for cell in times})
    texts = []
    for tokens in (1, 8, 32, 128):
        ratios = [times["marlin_int4", *shape, tokens] / times["native", *shape, tokens] for shape in shapes]
        texts.append(f"{min(ratios):.2f} to {max(ratios):.2f} at {tokens}")
    return wrapped(
        "Speed of a linear at 4 bits relative to vLLM's int4 linear (Marlin, groups of 128) on the same GPU, in three "
        f"shapes: {', '.join(texts)} tokens (`benchmarks/results/h200/marlin.json`)."
    )


def cpu_line() -> str:
    """One linear on the CPU beside torch's 16-bit one, how near logits are to exllamav3's, and memory."""
    rows = [
        row
        for row in load("cpu/cpu_linear.json")["rows"]
        if row.get("in") == 4096 and row.get("out") == 14336 and "us" in row
    ]
    peer = {row["m"]: row["us"] for row in rows if row["kernel"] == "torch_bf16"}
    ours = {row["m"]: row["us"] for row in rows if (row.get("bits"), row.get("codebook")) == (4, "mul1")}
    speed = ", ".join(f"{peer[tokens] / ours[tokens]:.1f} at {tokens}" for tokens in (1, 16, 128))
    logits = [row["error"] for row in load("cpu/golden.json")["rows"] if row["subject"] == "logits"]
    memory = [row["peak_over_pack"] for row in load("cpu/memory.json")["rows"] if row["subject"] == "load"]
    return wrapped(
        f"CPU ({SETS[_set_of_linears()]}): speed of a 4096 × 14336 linear at 4 bits relative to torch's in bf16, "
        f"{speed} tokens (`cpu_linear.json`). {one_token_line(load('cpu/cpu_linear_isa.json'))}. "
        f"Logits of {len(logits)} dense packs made by exllamav3 differ from exllamav3's own by a "
        f"relative error of {min(logits):.1e} to {max(logits):.1e} (`golden.json`). Loading takes at most "
        f"{max(memory):.2f} times the size of the pack in memory (`memory.json`). These files are in "
        "`benchmarks/results/cpu/`."
    )


def _set_of_linears() -> str:
    """The instruction set that cpu_linear.json was measured under."""
    return next(str(row["isa"]) for row in load("cpu/cpu_linear.json")["rows"] if "isa" in row)


def demo_line() -> str:
    """What the demo recorded."""
    demo = load("cpu/demo.json")
    row = demo["rows"][-1]
    isa = row.get("isa")
    if isa is None and demo["meta"]["cpu"] == load("cpu/cpu_linear.json")["meta"]["cpu"]:
        isa = _set_of_linears()  # the same machine, and the demo takes the best set
    under = f" ({SETS[isa]})" if isa else ""
    return wrapped(
        f"The demo (SmolLM2-135M at {row['bits']:g} bits, quantized without calibration) generates "
        f"{row['tokens_per_second']:.0f} tokens/s on the CPU{under}; the KL divergence of its logits from the "
        f"16-bit model's is {row['kl']:.3f} nats a token (`benchmarks/results/cpu/demo.json`)."
    )


def readme_part() -> str:
    """The measured part of README.md."""
    parts = (machines_line, gpu_table, marlin_line, prefill_line, moe_line, serve_table, cpu_line, demo_line)
    return "\n".join(part() for part in parts)


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme_part,
    "docs/kernels-gpu.md": lambda: "\n\n".join(
        (linear_tables(load("h200/linear.json"), load("h200/marlin.json")), gemm_tables(load("h200/gemm.json")))
    ),
    "docs/kernels-cpu.md": lambda: cpu_tables(
        *(
            load(f"cpu/{name}.json")
            for name in ("cpu_linear", "cpu_linear_isa", "cpu_moe", "cpu_encode_isa", "cpu_busy", "cpu_demo")
        )
    ),
    "docs/kv-cache.md": lambda: kv_tables(load("h200/kv.json")),
    "docs/support-matrix.md": lambda: gpu_tests(ROOT / "benchmarks/results/h200/tests.json"),
    "docs/offload.md": lambda: tier_tables(load("h200/tiers.json")),
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
    check = parser.parse_args().check
    return write_or_check({ROOT / name: page(name) for name in PAGES}, check=check)


if __name__ == "__main__":
    sys.exit(main())
