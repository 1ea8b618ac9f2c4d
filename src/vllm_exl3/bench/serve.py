"""Measures one served model under loads, and lays several models side by side."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_exl3.bench.client import Load, LoadError, Timing, drive
from vllm_exl3.bench.memory import from_log
from vllm_exl3.bench.served import NAME, Served, label_of, model_config, served, vocabulary_of
from vllm_exl3.demo.server import ServerError
from vllm_exl3.pack.wording import format_bytes
from vllm_exl3.tools.compare import measured
from vllm_exl3.tools.progress import progress, units

__all__ = ["load_row", "measure_model", "print_side_by_side"]


def measure_model(
    model: str,
    loads: Sequence[Load],
    *,
    rounds: int,
    options: Sequence[str],
    port: int | None,
    console: Console,
) -> list[dict[str, Any]]:
    """Serve one model and send it every load.

    Args:
        model: a folder or a repository.
        loads: what to send, each after a first run that is not counted.
        rounds: how often each is measured.
        options: more options of ``vllm serve``.
        port: where to listen; any free one, if None.
        console: where to say what is done.

    Returns:
        A row of the start with its memory, and one row per load.

    Raises:
        ServerError: the server did not start, refused a request or died; says what it last logged.
        Exl3PackError: there is no such model.
    """
    vocabulary = vocabulary_of(model, model_config(model))
    rows, label = [], label_of(model)
    with served(model, console=console, options=options, port=port) as running:
        total = sum(load.requests * (rounds + 1) for load in loads)
        try:
            with progress(console, f"driving {label}", total, units("requests")) as done:
                for number, load in enumerate(loads):
                    timings = [
                        drive(running.server.url, NAME, vocabulary, load, seed=1000 * number + turn, done=done)
                        for turn in range(rounds + 1)
                    ]
                    rows.append(load_row(label, load, timings[1:]))
                    running.sample()
        except LoadError as error:
            raise ServerError(f"{label}: {error}\n{running.server.last_words()}") from error
        return [_start_row(label, running), *rows]


def load_row(label: str, load: Load, timings: Sequence[Timing]) -> dict[str, Any]:
    """The row of one load: medians of the rounds, and every round."""
    row: dict[str, Any] = {"subject": "serve", "model": label}
    row |= {
        "concurrency": load.concurrency,
        "prompt": load.prompt,
        "output": load.output,
        "requests": load.requests,
    }
    row |= measured("tokens_per_second", (timing.tokens / timing.seconds for timing in timings))
    for name, values in (
        ("first_token", [timing.first for timing in timings]),
        ("between_tokens", [timing.between for timing in timings]),
    ):
        if all(values):  # answers of one token have nothing in between
            for percent in (50, 99):
                row |= measured(f"{name}_p{percent}_s", (float(np.percentile(one, percent)) for one in values))
    return row


def _start_row(label: str, running: Served) -> dict[str, Any]:
    peak = running.peak
    row = {"subject": "start", "model": label, "ready_s": round(running.ready, 2), "host_peak_bytes": peak.host}
    if peak.gpu is not None:
        row["gpu_peak_bytes"] = peak.gpu
    return row | from_log(running.server.log_text())


def print_side_by_side(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print the rows of all models, each load's beside one another, with each model's ratio to the first."""
    rows = list(rows)
    starts = [row for row in rows if row["subject"] == "start"]
    table = Table(title="Memory and start", title_justify="left", box=None, pad_edge=False)
    for heading in ("model", "ready s", "weights", "GPU peak", "host peak", "KV tokens"):
        table.add_column(heading, justify="left" if heading == "model" else "right", overflow="fold")
    for row in starts:
        table.add_row(
            row["model"],
            f"{row['ready_s']:.1f}",
            *(
                format_bytes(row[key]) if key in row else "-"
                for key in ("weight_bytes", "gpu_peak_bytes", "host_peak_bytes")
            ),
            f"{row['tokens_in_cache']:,}" if "tokens_in_cache" in row else "-",
        )
    console.print(table)
    loads = [row for row in rows if row["subject"] == "serve"]
    keys = list(dict.fromkeys(map(_load_key, loads)))
    for key in keys:
        console.print()
        console.print(_load_table(key, [row for row in loads if _load_key(row) == key]))


def _load_key(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["concurrency"], row["prompt"], row["output"]


def _load_table(key: tuple[int, int, int], rows: Sequence[Mapping[str, Any]]) -> Table:
    title = f"{key[0]} at a time, {key[1]} tokens in, {key[2]} out"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("model", "tokens/s", "±", "", "first p50 ms", "p99", "between p50 ms", "p99"):
        table.add_column(heading, justify="left" if heading == "model" else "right", overflow="fold")
    for row in rows:
        times = [
            f"{row[name] * 1e3:.1f}" if name in row else "-"
            for name in ("first_token_p50_s", "first_token_p99_s", "between_tokens_p50_s", "between_tokens_p99_s")
        ]
        each = row["tokens_per_second_each"]
        spread = f"{statistics.stdev(each):.1f}" if len(each) > 1 else "-"
        ratio = f"{row['tokens_per_second'] / rows[0]['tokens_per_second']:.2f}×"
        table.add_row(row["model"], f"{row['tokens_per_second']:.1f}", spread, ratio, *times)
    return table
