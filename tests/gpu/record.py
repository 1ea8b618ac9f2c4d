"""What a run of ``tests/gpu`` leaves in benchmarks/results, and whether kernels have changed since.

Needs neither torch nor a GPU: every run of the tests asks.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_exl3.cuda.tested import add_run, kernels_fingerprint
from vllm_exl3.tools.results import write_results

__all__ = ["RESULTS", "ROOT", "Row", "kernels_moved", "without_folders", "write_record"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "tests.json"
OUTCOMES = ("passed", "failed", "skipped", "not run")

_FOLDERS = re.compile(r"(?<![\w.:/-])/(?:[\w.+-]+/)+")

Row = dict[str, Any]


def kernels_moved(path: Path = RESULTS) -> str | None:
    """A line of warning where the kernels are not those that the recorded run tested, or None."""
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if not path.exists():
        return f"no run of tests/gpu is recorded in {where}"
    meta = json.loads(path.read_text(encoding="utf-8"))["meta"]
    if meta["kernels"] == kernels_fingerprint():
        return None
    return (
        f"kernels have changed since tests/gpu ran on a GPU ({where}, {meta['date']}, "
        f"commit {(meta['commit'] or 'unknown')[:12]}): run python -m tests.gpu.run on one"
    )


def without_folders(text: str) -> str:
    """A message with paths as they are in this repository, and those outside it by the file's name alone."""
    return _FOLDERS.sub("", text.replace(f"{ROOT}/", ""))


def write_record(path: Path, rows: Iterable[Row], *, command: str, facts: Row) -> Row:
    """Write a results file of one run; returns its ``meta``.

    Args:
        path: the file, which is replaced.
        rows: ``test``, ``outcome`` (one of `OUTCOMES`), ``seconds``, and ``reason`` where it did not pass.
        command: what a reader types to run it again.
        facts: for ``meta``; ``commit`` stands for git's where it is given.
    """
    kept = sorted(rows, key=lambda row: str(row["test"]))
    counts = Counter(row["outcome"] for row in kept)
    path.unlink(missing_ok=True)
    facts = {"kernels": kernels_fingerprint(), "counts": {name: counts[name] for name in OUTCOMES}, **facts}
    write_results(path, kept, machine="h200", command=command, facts=facts)
    meta: Row = json.loads(path.read_text(encoding="utf-8"))["meta"]
    if path == RESULTS and meta.get("gpu"):
        add_run(ROOT / "src" / "vllm_exl3" / "cuda", meta)
    return meta
