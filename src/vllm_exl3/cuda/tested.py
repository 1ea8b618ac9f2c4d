"""On which GPU models the kernels of this build were tested, as ``tests/gpu`` recorded it.

The record lies in the package, so that `vllm-exl3 doctor` can say it anywhere. Needs neither torch nor a GPU.
"""

import importlib.resources
import json
from pathlib import Path
from typing import Any

from vllm_exl3.cuda.compiler import sources_fingerprint

__all__ = ["RECORD", "add_run", "kernels_fingerprint", "tested_on", "with_run"]

RECORD = "tested.json"
"""The record's name beside this module: one entry a GPU model, the latest run of each."""


def kernels_fingerprint() -> str:
    """SHA-256 over the sources of all kernels, CUDA's and Triton's, and CUDA's options."""
    folder = importlib.resources.files("vllm_exl3") / "attention"  # the package itself needs torch
    modules = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name[-3:] == ".py"}
    return sources_fingerprint({name: text for name, text in modules.items() if "@triton.jit" in text})


def tested_on(gpu: str, record: str | None = None) -> str:
    """A sentence about a GPU model: whether the kernels of this build were tested on it.

    Args:
        gpu: the model's name, as CUDA gives it.
        record: the record's text, by default the package's own.
    """
    if record is None:
        record = (importlib.resources.files("vllm_exl3") / "cuda" / RECORD).read_text(encoding="utf-8")
    runs = {run["gpu"]: run for run in json.loads(record)}
    if (run := runs.get(gpu)) is None:
        return f"never tested on this model, {gpu} (tested on: {', '.join(runs) or 'none'})"
    tests = f"{run['passed']} of {run['passed'] + run['failed']} tests passed on {gpu}, {run['date']}"
    return tests if run["kernels"] == kernels_fingerprint() else f"{tests}, but with an earlier version of the kernels"


def with_run(record: str, meta: dict[str, Any]) -> str:
    """The record's new text after one more run; the model's earlier run gives way.

    Args:
        record: the record's text.
        meta: of the results file of the run, which names ``gpu``, ``date``, ``kernels``, ``commit`` and ``counts``.
    """
    run = {name: meta[name] for name in ("gpu", "date", "commit", "kernels")}
    run |= {name: meta["counts"][name] for name in ("passed", "failed")}
    runs = [other for other in json.loads(record) if other["gpu"] != run["gpu"]]
    return json.dumps(sorted([*runs, run], key=lambda entry: str(entry["gpu"])), indent=1) + "\n"


def add_run(folder: Path, meta: dict[str, Any]) -> None:
    """Bring the record in a checkout's package up to date.

    Args:
        folder: ``vllm_exl3/cuda`` of the checkout.
        meta: see `with_run`.
    """
    path = folder / RECORD
    path.write_text(with_run(path.read_text(encoding="utf-8") if path.exists() else "[]", meta), encoding="utf-8")
