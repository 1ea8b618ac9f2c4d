"""Writes the measured part of README.md from benchmarks/results; ``--check`` only says whether it is current."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: made by `make docs` -->\n", "<!-- end of measured -->\n"
SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672))
TOKENS = (1, 8, 128)


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
    """Decoding by a whole model on the GPU."""
    rows = load("h200/serve.json")["rows"]
    speeds = {
        kernel: ", ".join(f"{row['tokens_per_second']:.0f}" for row in rows if row["kernel"] == kernel)
        for kernel in ("native", "cublas_bf16")
    }
    batches = ", ".join(str(row["m"]) for row in rows if row["kernel"] == "native")
    return _wrapped(
        "A model of the shape of Llama 3 8B with random weights, served by vLLM on the same GPU, decodes (tokens/s at "
        f"batches of {batches}) {speeds['native']} at 4 bits with a 6-bit head, and {speeds['cublas_bf16']} in 16 bits "
        "(`benchmarks/results/h200/serve.json`)."
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


def page() -> str:
    """README.md with the measured part made anew."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"README.md lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{gpu_table()}\n{serve_line()}\n{cpu_line()}\n{demo_line()}\n{END}{after}"


def main() -> int:
    """Write the part, or with ``--check`` compare."""
    made = page()
    if "--check" in sys.argv[1:]:
        current = made == README.read_text(encoding="utf-8")
        print(f"README.md is {'current' if current else 'out of date: run `make docs`'}")
        return 0 if current else 1
    README.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
