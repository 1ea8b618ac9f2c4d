"""Compares two results files: which measures moved by more than their repeats differ among themselves."""

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["Change", "changes", "measured", "read_results"]

Row = Mapping[str, Any]

_LOWER = re.compile(r"^us_|(^|_)(us|s|error|kl|bytes|mib)$")
_HIGHER = re.compile(r"(^|_)(gbps|tflops|gweights|per_second|per_s|tokens_in_cache)$")
_BESIDE = re.compile(r"^(commit|command|limit_us|.*_each)$|_(over|of)_|^(over|of)_")
"""Names that neither identify a row nor are measured."""

_DEVIATIONS = 2.5
_LEAST = 0.01
_WITHOUT_REPEATS = 0.05
"""A change is beyond noise from so many standard deviations of the difference, and this share, on."""


@dataclass(frozen=True)
class Change:
    """A measure of one row that differs from the baseline's beyond noise."""

    row: str
    measure: str
    before: float
    now: float
    noise: float
    better: bool

    def line(self) -> str:
        """One line for a terminal."""
        ratio = self.now / self.before - 1 if self.before else math.inf
        word = "better" if self.better else "worse"
        return (
            f"{word:6s} {self.row}: {self.measure} {self.before:.4g} -> {self.now:.4g} "
            f"({ratio:+.1%}; noise {self.noise / abs(self.before or 1):.1%})"
        )


def measured(name: str, each: Iterable[float]) -> dict[str, Any]:
    """A measure's fields of a row: the median, and all repeats for `changes` to take the noise from."""
    values = list(each)
    return {name: round(statistics.median(values), 6), f"{name}_each": [round(value, 6) for value in values]}


def read_results(path: Path) -> dict[str, Any]:
    """A results file.

    Raises:
        Exl3PackError: there is none, or it is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content["meta"], dict) and all(isinstance(row, dict) for row in content["rows"]):
            return dict(content)
        found = "meta or rows of another kind"
    except OSError as error:
        found = str(error.strerror)
    except (ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    raise Exl3PackError(
        found=found,
        expected='a results file: {"meta": {...}, "rows": [...]}',
        where=str(path),
        remedy="Give a file that `vllm-exl3 bench … --json FILE` or a script in benchmarks/ wrote.",
    )


def changes(baseline: Iterable[Row], rows: Iterable[Row]) -> tuple[list[Change], int]:
    """What moved beyond noise.

    The noise of a difference is 2.5 standard deviations of single repeats of both files, at least 1 %; 5 % where a
    file has no repeats.

    Args:
        baseline: the rows that are compared with.
        rows: the new rows.

    Returns:
        The changes in the order of ``rows``, and the number of measures that both have.
    """
    before = {_identity(row): row for row in baseline}
    found, compared = [], 0
    for row in rows:
        earlier = before.get(_identity(row))
        for name, now, higher in _measures(row):
            was = None if earlier is None else earlier.get(name)
            if earlier is None or not _is_number(was):
                continue
            compared += 1
            noise = _noise(earlier, row, name)
            if abs(now - was) > noise:
                found.append(Change(_words(row), name, was, now, noise, (now > was) == higher))
    return found, compared


def _noise(earlier: Row, row: Row, name: str) -> float:
    repeats = [list(side.get(f"{name}_each") or ()) for side in (earlier, row)]
    level = abs(float(earlier[name]))
    if min(map(len, repeats)) < 2:
        return _WITHOUT_REPEATS * level
    return max(_DEVIATIONS * math.sqrt(sum(map(statistics.variance, repeats))), _LEAST * level)


def _measures(row: Row) -> Iterator[tuple[str, float, bool]]:
    for name, value in row.items():
        if _is_number(value) and not _BESIDE.search(name) and (_LOWER.search(name) or _HIGHER.search(name)):
            yield name, value, _HIGHER.search(name) is not None


def _settings(row: Row) -> dict[str, Any]:
    """What is measured: everything but measures, and numbers that are written beside them."""
    return {
        name: float(value) if _is_number(value) else value
        for name, value in row.items()
        if not (_BESIDE.search(name) or _LOWER.search(name) or _HIGHER.search(name))
    }


def _identity(row: Row) -> str:
    return json.dumps(_settings(row), sort_keys=True)


def _words(row: Row) -> str:
    return " ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in _settings(row).items()
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
