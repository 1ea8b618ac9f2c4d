"""Renders a survey of a pack as tables for a terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_exl3.pack.wording import counted, format_bytes

__all__ = ["print_survey"]


def print_survey(survey: Mapping[str, Any], console: Console | None = None) -> None:
    """Print everything that `vllm_exl3.plan.survey.survey` found."""
    # Names of tensors and folders are data: neither markup nor emoji codes.
    console = console or Console(highlight=False, markup=False, emoji=False)
    _print_overview(survey, console)
    for title, key in (("Bits per weight", "bits"), ("Codebooks", "codebooks")):
        rows = [(row["label"], row["tensors"], row["weights"], format_bytes(row["bytes"])) for row in survey[key]]
        rows = sorted(rows, key=lambda row: float(row[0])) if key == "bits" else rows
        _print_table(console, title, ("", "linears", "weights", "bytes"), rows)
    _print_table(
        console,
        "Bits per weight by kind of module",
        ("kind", "modules", "weights", "bytes", "bits"),
        ((row["kind"], row["modules"], row["weights"], format_bytes(row["bytes"]), f"{row['bits']:.2f}")
         for row in survey["module_kinds"]),
    )  # fmt: skip
    _print_table(console, "EXL3 linears", ("modules", "count", "in", "out", "K"), map(_shape_row, survey["shapes"]))
    _print_table(
        console,
        "Dense modules",
        ("modules", "count", "dtype", "bytes", "why"),
        ((row["modules"], row["count"], row["dtype"], format_bytes(row["bytes"]), row["why"])
         for row in survey["dense"]),
    )  # fmt: skip
    _print_tables_and_experts(survey, console)
    _print_accounts(survey["bytes_by_fate"], console)
    for title, key in (("Tensor parallel", "tensor_parallel"), ("Expert parallel", "expert_parallel")):
        degrees = [
            (row["degree"], "yes" if row["legal"] else "no", row["blocker"] or row["note"] or "") for row in survey[key]
        ]
        _print_table(console, title, ("degree", "works", "first reason why not, or what it costs"), degrees)
    cards = [(f"{gib} GB", line) for gib, line in survey["cards"].items()]
    _print_table(console, "On one card (vllm-exl3 plan says more)", ("card", ""), cards)
    _print_verdict(survey, console)


def _print_overview(survey: Mapping[str, Any], console: Console) -> None:
    console.print(survey["source"] + (f" at {survey['commit']}" if survey["commit"] else ""), style="bold")
    console.print(f"model      {', '.join(survey['architectures']) or 'unknown'} ({survey['model_type']})")
    tensors, files = counted(survey["tensors"], "tensor"), counted(survey["files"], "file")
    console.print(f"size       {format_bytes(survey['bytes'])} in {tensors}, {files}")
    declared = ", ".join(f"{key} {value}" for key, value in survey["declared"].items())
    console.print(f"declared   {declared or 'nothing'}", markup=False)
    averages = survey["average_bits"]
    console.print(f"measured   {_bits(averages['body'])} bits in the body, {_bits(averages['head'])} in the head")


def _bits(value: float | None) -> str:
    return "no EXL3" if value is None else f"{value:g}"


def _shape_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        row["modules"],
        row["count"],
        _width(row["model_in"], row["in"]),
        _width(row["model_out"], row["out"]),
        (f"{row['bits']:g}"),
    )


def _width(model: int, stored: int) -> str:
    return str(stored) if model == stored else f"{model} padded to {stored}"


def _print_tables_and_experts(survey: Mapping[str, Any], console: Console) -> None:
    tables = [
        (table["module"], table["format"], table["rows"], format_bytes(table["bytes"]))
        for table in (*survey["embeddings"], *survey["ngram_tables"])
    ]
    _print_table(console, "Quantized tables", ("module", "format", "rows", "bytes"), tables)
    if experts := survey["experts"]:
        bits = ", ".join(f"{count} at K = {bits}" for bits, count in experts["bits"].items())
        counts = " or ".join(map(str, experts["experts"]))
        console.print("\nExperts", style="bold")
        console.print(
            f"{counted(experts['layers'], 'layer')} of {counts} experts, {'/'.join(experts['roles'])}: {bits}; "
            f"{format_bytes(experts['bytes'])}"
        )


def _print_accounts(accounts: Mapping[str, Any], console: Console) -> None:
    rows: list[tuple[object, ...]] = [
        ("served", kind, format_bytes(size), "") for kind, size in accounts["served"].items()
    ]
    rows += [
        ("skipped", row["rule"], format_bytes(row["bytes"]), f"{counted(row['tensors'], 'tensor')}: {row['reason']}")
        for row in accounts["skipped"]
    ]
    rows += [("skipped", f"file {name}", "", reason) for name, reason in accounts["ignored_files"].items()]
    unknown = accounts["unknown"]
    names = ", ".join(unknown["names"])
    if unknown["tensors"]:
        rows.append(("unknown", counted(unknown["tensors"], "tensor"), format_bytes(unknown["bytes"]), names))
    _print_table(console, "Every stored byte", ("", "what", "bytes", ""), rows)


def _print_verdict(survey: Mapping[str, Any], console: Console) -> None:
    console.print()
    for fault in survey["faults"]:
        console.print(
            f"FAULT  {fault['where']}\n  found     {fault['found']}\n  expected  {fault['expected']}\n"
            f"  to do     {fault['remedy']}",
            markup=False,
        )
    for text in survey["not_served_yet"]:
        console.print(f"NOT SERVED BY THIS VERSION  {text}", markup=False)
    for text in survey["warnings"]:
        console.print(f"WARNING  {text}", markup=False)
    if not survey["faults"]:
        console.print("No faults.")


def _print_table(console: Console, title: str, headings: Iterable[str], rows: Iterable[tuple[object, ...]]) -> None:
    filled = [tuple(str(cell) for cell in row) for row in rows]
    if not filled:
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in headings:
        numeric = heading in ("count", "linears", "weights", "bytes", "rows", "degree", "K", "bits")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in filled:
        table.add_row(*row)
    console.print()
    console.print(table)
