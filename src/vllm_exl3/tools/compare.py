"""Compares two results files: which measures moved by more than their repeats differ among themselves."""

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Change", "changes", "measured"]

Row = Mapping[str, Any]

_LOWER = re.compile(r"^us_|(^|_)(us|s|error|kl|bytes|mib)$")
_HIGHER = re.compile(r"(^|_)(gbps|tflops|gweights|per_second|per_s|tokens_in_cache)$")
_BESIDE = re.compile(r"^(commit|command|limit_us|.*_each)$|_(over|of)_|^(over|of)_")
"""Names that neither identify a row nor are measured."""

_DEVIATIONS = 2.5
_LEAST = 0.01
_WITHOUT_REPEATS = 0.05
"""A change is beyond noise from so many standard deviations of the difference, and this share, on."""

_STUDENT = {1: 63.7, 2: 9.92, 3: 5.84, 4: 4.60, 5: 4.03, 6: 3.71, 8: 3.36, 10: 3.17, 15: 2.95, 20: 2.85, 40: 2.70}
"""Two-sided 1 % points of Student's distribution by degrees of freedom."""

_MEDIAN = (math.pi / 2) ** 0.5
"""Standard error of a median over that of a mean, for normal values; a median of two is their mean."""


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


def changes(baseline: Iterable[Row], rows: Iterable[Row]) -> tuple[list[Change], int]:
    """What moved beyond noise.

    The noise of a difference is the largest of 2.5 standard deviations of single repeats of both files (runs differ
    by more than repeats within one run), the 1 % point of Welch's test (few repeats say little about how far they
    scatter), and 1 %. It is 5 % where a file has no repeats. A measure that is a number in one file and not finite
    (null) in the other is a change, whatever the noise.

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
            was = _number(earlier[name]) if earlier is not None and name in earlier else None
            if earlier is None or was is None or not (math.isfinite(was) or math.isfinite(now)):
                continue
            compared += 1
            if not (math.isfinite(was) and math.isfinite(now)):
                found.append(Change(_words(row), name, was, now, 0.0, math.isfinite(now)))
            elif abs(now - was) > (noise := _noise(earlier, row, name, was)):
                found.append(Change(_words(row), name, was, now, noise, (now > was) == higher))
    return found, compared


def _noise(earlier: Row, row: Row, name: str, level: float) -> float:
    repeats = [_repeats(side.get(f"{name}_each")) for side in (earlier, row)]
    if min(map(len, repeats)) < 2:
        return _WITHOUT_REPEATS * abs(level)
    variances = list(map(statistics.variance, repeats))
    return max(_DEVIATIONS * math.sqrt(sum(variances)), _welch(variances, repeats), _LEAST * abs(level))


def _welch(variances: Sequence[float], repeats: Sequence[Sequence[float]]) -> float:
    """The difference of two medians that Welch's test finds significant at 1 %."""
    counts = list(map(len, repeats))
    squared = [variance / count for variance, count in zip(variances, counts, strict=True)]
    if not sum(squared):
        return 0.0
    freedom = sum(squared) ** 2 / sum(part**2 / (count - 1) for part, count in zip(squared, counts, strict=True))
    point = _STUDENT[max((known for known in _STUDENT if known <= freedom + 1e-9), default=1)]
    of_medians = [part * (_MEDIAN**2 if count > 2 else 1) for part, count in zip(squared, counts, strict=True)]
    return point * math.sqrt(sum(of_medians))


def _repeats(each: Any) -> list[float]:
    """The repeats of a measure; a file that holds something else there has none."""
    values = [_number(value) for value in each] if isinstance(each, list) else []
    return [value for value in values if value is not None and math.isfinite(value)]


def _measures(row: Row) -> Iterator[tuple[str, float, bool]]:
    for name, entry in row.items():
        value = _number(entry)
        if value is not None and not _BESIDE.search(name) and (_LOWER.search(name) or _HIGHER.search(name)):
            yield name, value, _HIGHER.search(name) is not None


def _settings(row: Row) -> dict[str, Any]:
    """What is measured: everything but measures, and numbers that are written beside them."""
    return {
        name: value if value is None or (number := _number(value)) is None else number
        for name, value in row.items()
        if not (_BESIDE.search(name) or _LOWER.search(name) or _HIGHER.search(name))
    }


def _identity(row: Row) -> str:
    return json.dumps(_settings(row), sort_keys=True)


def _words(row: Row) -> str:
    return " ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in _settings(row).items()
    )


def _number(value: Any) -> float | None:
    """A measure as a number: NaN for null, which stands for what was not finite; None for anything else."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
