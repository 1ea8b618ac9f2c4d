"""The measured part of docs/kernels-cpu.md: one token, the encoder and a busy machine, by instruction set."""

from collections.abc import Iterable
from typing import Any

from linear_tables import wrapped

__all__ = ["SETS", "cpu_tables", "one_token_line"]

Row = dict[str, Any]
Results = dict[str, Any]

SETS = {
    "avx2": "AVX2",
    "avx2_vnni": "AVX2 with AVX-VNNI",
    "avx512": "AVX-512",
    "avx512_vnni": "AVX-512 with VNNI",
    "avx512_vbmi": "AVX-512 with VNNI and VBMI",
    "avx512_words": "AVX-512 with VNNI and VBMI, in words",
    "avx512_fp16": "AVX-512 with FP16, in words",
    "amx": "AVX-512 with FP16, and AMX",
}
"""How the documents call the instruction sets."""


def cpu_tables(
    tokens: Results, linear: Results, experts: Results, encode: Results, busy: Results, demo: Results
) -> str:
    """All tables of the page's measured part."""
    parts = (_tokens(tokens), _linears(linear), _experts(experts), _encoder(encode), _busy(busy), _demo(demo))
    return "\n".join(line for part in parts for line in part)


def one_token_line(linear: Results) -> str:
    """One sentence: a token of a 4-bit linear under AVX2."""
    kind = ("avx2", "mul1", 4)
    found = {row["threads"]: row for row in linear["rows"] if (row["isa"], row["codebook"], row["bits"]) == kind}
    row = found[max(found)]
    # Both sets leave torch the same kernels; where a process' memory lies changes how fast they read it.
    peers = [other for other in linear["rows"] if other["isa"] in ("avx2", "avx2_vnni")]
    least = min(other["bf16_us"] for other in peers if other["threads"] == row["threads"])
    cores = "one core" if row["threads"] == 1 else f"{row['threads']} cores"
    ratios = f"{least / row['us']:.1f} to {row['over_torch_bf16']:.1f}"
    return (
        f"Under AVX2, on {cores} of an {linear['meta']['cpu']}, that linear serves one token {ratios} times as fast as "
        "torch's in bf16, kept to AVX2 as well (`cpu_linear_isa.json`; other codebooks: "
        "[docs/kernels-cpu.md](docs/kernels-cpu.md#by-instruction-set))"
    )


_KINDS = (("mul1", 2), ("mul1", 4), ("mul1", 6), ("mul1", 8), ("mcg", 4), ("3inst", 4))
"""Codebooks and rates that the table of several tokens shows."""


def _tokens(results: Results) -> list[str]:
    """Several numbers of tokens under the best instruction set."""
    meta, rows = results["meta"], results["rows"]
    bandwidth = next(row for row in rows if row["kernel"] == "read_bandwidth")
    timed = [row for row in rows if "us" in row]
    text = (
        f"The best set of an {meta['cpu']} (a virtual machine), {SETS[bandwidth['isa']]}, on {meta['threads']} "
        f"threads, {meta['date']} (`benchmarks/results/cpu/cpu_linear.json`): µs per call, as the median of "
        "rounds in which torch and every kernel took turns, with more weights than the caches hold; in brackets, the "
        "speed relative to `torch.nn.functional.linear` in bf16 in the same rounds. A sum over int32 reads "
        f"{bandwidth['gbps']:.1f} GB/s there."
    )
    peers = {(row["in"], row["out"], row["m"]): row["us"] for row in timed if row["kernel"] == "torch_bf16"}
    own = {
        (row["in"], row["out"], row["m"], row["codebook"], row["bits"]): row["us"]
        for row in timed
        if row["kernel"] == "native"
    }
    table = []
    for (inputs, outputs, m), peer in peers.items():
        times = [own[inputs, outputs, m, *kind] for kind in _KINDS]
        cells = [f"{time:.0f} ({peer / time:.2f})" for time in times]
        table.append([f"{inputs}×{outputs}", str(m), f"{peer:.0f}", *cells])
    heads = [f"{codebook.replace('3inst', '3INST')} K={bits}" for codebook, bits in _KINDS]
    return [wrapped(text).rstrip("\n"), "", *_table(["in×out", "M", "bf16", *heads], table)]


def _linears(results: Results) -> list[str]:
    meta, rows = results["meta"], results["rows"]
    sets = list(dict.fromkeys(row["isa"] for row in rows))
    bits = sorted({row["bits"] for row in rows})
    shape = f"{rows[0]['in']} × {rows[0]['out']}"
    others = _most(row.get("others") for row in rows)
    text = (
        f"One token through a {shape} linear on an {meta['cpu']} (a virtual machine), {meta['date']}, all sets in one "
        "run (`benchmarks/results/cpu/cpu_linear_isa.json`): thousand million weights a second, and in brackets the "
        f"speed relative to torch's bf16 linear under the same set. Others kept up to {others:.1f} processors busy "
        "meanwhile, so that one thread is measured in CPU time, as the best of many calls; all threads are measured in "
        "wall time, only where processors were idle."
    )
    lines = [wrapped(text).rstrip("\n"), ""]
    for threads in sorted({row["threads"] for row in rows}):
        cells = {(row["isa"], row["codebook"], row["bits"]): row for row in rows if row["threads"] == threads}
        table = []
        for isa in sets:
            for codebook in ("mul1", "mcg", "3inst"):
                found = [cells.get((isa, codebook, k)) for k in bits]
                values = [
                    "" if row is None else f"{row['gweights']:.1f} ({row['over_torch_bf16']:.2f})" for row in found
                ]
                table.append([SETS[isa], codebook.replace("3inst", "3INST"), *values])
        lines += _table([f"{threads} thread{'s'[: threads > 1]}", "codebook", *(f"K = {k:g}" for k in bits)], table)
    return lines


def _experts(results: Results) -> list[str]:
    """Routed experts, and how much faster than one linear after another."""
    meta, rows = results["meta"], [row for row in results["rows"] if row["kernel"] == "native"]
    shape = rows[0]
    text = (
        f"{shape['experts']} routed experts of {shape['hidden']} × {shape['intermediate']}, {shape['top_k']} a token, "
        f"on an {meta['cpu']} (a virtual machine), {SETS[meta['isa']]}, {meta['date']} "
        "(`benchmarks/results/cpu/cpu_moe.json`): µs per call, and in brackets how many times as fast as one linear "
        "after another with PyTorch between them. One thread in CPU time, all in wall time, each as the least of many "
        f"calls; others kept up to {_most(row.get('others') for row in rows):.1f} processors busy meanwhile. For one "
        "token also thousand million weights a second."
    )
    kinds = list(dict.fromkeys((row["codebook"], row["bits"]) for row in rows))
    cells = {(row["codebook"], row["bits"], row["m"], row["threads"]): row for row in rows}
    columns = list(dict.fromkeys((row["m"], row["threads"]) for row in rows))
    table = []
    for codebook, bits in kinds:
        line = [f"{codebook.replace('3inst', '3INST')} K = {bits:g}"]
        for m, threads in columns:
            row = cells.get((codebook, bits, m, threads))
            rate = f", {row['gweights']:.1f} G/s" if row and m == 1 else ""
            line.append(f"{row['us']:.0f} ({row['over_by_expert']:.2f}){rate}" if row else "")
        table.append(line)
    heads = [f"M = {m}, {threads} thread{'s'[: threads > 1]}" for m, threads in columns]
    return [wrapped(text).rstrip("\n"), "", *_table(["", *heads], table)]


def _encoder(results: Results) -> list[str]:
    meta, rows = results["meta"], results["rows"]
    sets = list(dict.fromkeys(row["isa"] for row in rows))
    kinds = list(dict.fromkeys((row["codebook"], row["bits"]) for row in rows))
    cells = {(row["isa"], row["codebook"], row["bits"]): row["us_tile"] for row in rows}
    text = (
        f"The encoder on the same kind of machine, {meta['date']}: µs of CPU time a tile on one thread, the least of "
        "some rounds in which the sets took turns; they find the same trellises "
        "(`benchmarks/results/cpu/cpu_encode_isa.json`)."
    )
    table = [
        [f"{codebook.replace('3inst', '3INST')} K = {bits:g}", *(f"{cells[isa, codebook, bits]:.0f}" for isa in sets)]
        for codebook, bits in kinds
    ]
    return [wrapped(text).rstrip("\n"), "", *_table(["", *(SETS[isa] for isa in sets)], table)]


def _busy(results: Results) -> list[str]:
    meta, rows = results["meta"], results["rows"]
    cells = {(row["threads"], row["waiting"], row["competitor"]): row for row in rows}
    text = (
        f"The demo's model served under {SETS[meta['isa']]} on two processors, {meta['date']}: tokens a second without "
        "and with a process that takes one of them, as the median (and the best) of some answers, and how many "
        "processors yet other work on the machine kept busy meanwhile, without which they would be more "
        "(`benchmarks/results/cpu/cpu_busy.json`)."
    )
    table = []
    for threads, waiting in dict.fromkeys((row["threads"], row["waiting"]) for row in rows):
        pair = [cells[threads, waiting, competitor] for competitor in (False, True)]
        shown = [
            part
            for row in pair
            for part in (
                f"{row['tokens_per_second']:.1f} ({row['most']:.1f})",
                f"{row['processors_busy_by_others']:.1f}",
            )
        ]
        table.append([threads, waiting, *shown])
    heads = ["threads of the model", "how they wait", "without", "other work", "with", "other work"]
    return [wrapped(text).rstrip("\n"), "", *_table(heads, table)]


def _demo(results: Results) -> list[str]:
    meta, rows = results["meta"], results["rows"]
    text = (
        f"Seconds of the whole demo from an empty cache, and of its quantization, on {meta['threads']} threads of an "
        f"{meta['cpu']}, {meta['date']} (`benchmarks/results/cpu/cpu_demo.json`)."
    )
    cells = {(row["instructions"], row["competitor"]): row for row in rows}
    table = []
    for name in dict.fromkeys(row["instructions"] for row in rows):
        pair = [cells[name, competitor] for competitor in (False, True)]
        table.append([name, *(f"{row['seconds']:.0f} ({row['quantization_seconds']})" for row in pair)])
    return [wrapped(text).rstrip("\n"), "", *_table(["instructions", "alone", "one processor taken"], table)]


def _most(values: Iterable[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _table(heads: list[str], lines: Iterable[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]
