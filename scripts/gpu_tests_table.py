"""The part of docs/support-matrix.md on the last run of tests/gpu, from benchmarks/results/h200/tests.json."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from linear_tables import wrapped

__all__ = ["gpu_tests"]

_SHOWN = 3
"""Tests of one reason that are named before the rest is counted."""


def gpu_tests(path: Path) -> str:
    """When, where and with what tests ran, a line a file, and what did not run, with why."""
    if not path.exists():
        return "No run is recorded.\n"
    content = json.loads(path.read_text(encoding="utf-8"))
    meta, rows = content["meta"], content["rows"]
    counts, versions = meta["counts"], meta["versions"]
    with_vllm = f"vLLM {versions['vllm']}" if "vllm" in versions else f"vLLM {meta['vllm']}"
    head = (
        f"On {meta['date']} `tests/gpu` ran on one {meta['gpu']} (driver {meta['driver']}, torch {versions['torch']}, "
        f"{with_vllm}), at commit `{(meta['commit'] or 'unknown')[:12]}`, in {meta['seconds']} s: "
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped and {counts['not run']} "
        f"did not run; {meta['left out as slow']} slow ones were left out (`benchmarks/results/h200/tests.json`). "
        "`make test` warns when kernels have changed since."
    )
    return "\n".join([wrapped(head), _files(rows), *_missing(rows)])


def _files(rows: list[dict[str, Any]]) -> str:
    outcomes = ("passed", "failed", "skipped", "not run")
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        files[row["test"].partition("::")[0]][row["outcome"]] += 1
    lines = [f"| file | {' | '.join(outcomes)} |", "|---|---|---|---|---|"]
    for name, counts in sorted(files.items()):
        lines.append(f"| `{name}` | " + " | ".join(str(counts[outcome] or "") for outcome in outcomes) + " |")
    return "\n".join(lines) + "\n"


def _missing(rows: list[dict[str, Any]]) -> list[str]:
    """Tests that did not pass, grouped by outcome and reason; a failure's reason is its last line."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["outcome"] != "passed":
            lines = str(row.get("reason", "")).strip().splitlines() or ["the time was over"]
            reason = lines[-1] if row["outcome"] == "failed" else lines[0]
            found[row["outcome"], reason.strip()[:120]].append(row["test"].removeprefix("tests/gpu/"))
    items = []
    for (outcome, reason), tests in sorted(found.items()):
        names = ", ".join(f"`{test}`" for test in tests[:_SHOWN])
        more = f" and {len(tests) - _SHOWN} more" if len(tests) > _SHOWN else ""
        items.append(wrapped(f"* {outcome}: {names}{more} ({reason})").rstrip("\n"))
    return ["\n".join(items) + "\n"] if items else []
