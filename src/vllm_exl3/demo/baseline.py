"""The demo's recorded results: what a run must not be much worse than, in the layout of all benchmark files."""

import json
from pathlib import Path
from typing import Any

from vllm_exl3.tools.results import write_results

__all__ = ["MARGIN", "BaselineError", "expected_divergence", "record"]

MARGIN = 1.2
"""A run fails when its KL divergence exceeds the recorded one times this."""


class BaselineError(RuntimeError):
    """The file of recorded results holds something else."""


def expected_divergence(path: Path, identity: dict[str, Any]) -> float | None:
    """The recorded KL divergence of the pack with this identity (encoder version and recipe).

    Args:
        path: a file that `record` wrote; it may be absent.
        identity: keys that a row must share.

    Returns:
        Nats per token, or None when nothing is recorded for this encoder and recipe.

    Raises:
        BaselineError: the file holds something else.
    """
    if not path.exists():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        matching = [row["kl"] for row in rows if all(row.get(key) == value for key, value in identity.items())]
        return float(matching[-1]) if matching else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BaselineError(
            f"{path}: found no results ({type(error).__name__}: {error}), expected what `vllm-exl3 demo --record` "
            "writes. Name another file with --baseline, or delete this one."
        ) from error


def record(path: Path, row: dict[str, Any], command: str) -> None:
    """Replace the file by one row and the machine it was measured on."""
    write_results(path, [row], machine="cpu", command=command)
