"""What timings of routed experts say beside themselves: cliffs, what mixing bit rates costs, and how far others are.

Used by ``gpu_moe.py``, without torch or a GPU.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SUMMARY = "native_summary"
"""`kernel` of the rows that `summaries` makes."""

MIXED, UNIFORM = "384 experts 5120×2304 K2..K8", "384 experts 5120×2304 K5"
"""Two shapes of the same bytes: bit rates that mix, and one."""

LEAST_STEP, MOST_STEP = 0.8, 1.2
"""Of neighbouring numbers of tokens the larger takes at least so many times as long, and at most so many per token."""

_TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048, 8192)

Rows = Iterable[Mapping[str, Any]]


def times(rows: Rows, kernel: str) -> dict[str, dict[int, float]]:
    """Microseconds of a kernel by shape and number of tokens."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kernel"] == kernel:
            found.setdefault(row["shape"], {})[row["m"]] = row["us"]
    return {shape: dict(sorted(cells.items())) for shape, cells in found.items()}


def cliffs(cells: Mapping[int, float]) -> list[tuple[int, int]]:
    """Neighbouring numbers of tokens of which the larger takes too little time or too much.

    Args:
        cells: microseconds by the number of tokens.
    """
    return [
        (few, many)
        for (few, us), (many, more) in itertools.pairwise(sorted(cells.items()))
        if not LEAST_STEP * us <= more <= MOST_STEP * us * many / few
    ]


def summaries(rows: Rows) -> list[dict[str, object]]:
    """Rows about rows: every shape's cliffs and extreme steps, and what mixing costs by the number of tokens."""
    native = times(rows, "native")
    found: list[dict[str, object]] = []
    for shape, cells in native.items():
        steps = [(b / a, b / a / (n / m)) for (m, a), (n, b) in itertools.pairwise(cells.items())]
        if steps:
            found.append({
                "kernel": SUMMARY, "shape": shape, "cliffs": cliffs(cells),
                "least_step": round(min(step for step, _ in steps), 3),
                "most_step_per_token": round(max(step for _, step in steps), 3),
            })  # fmt: skip
    if MIXED in native and UNIFORM in native:
        ratios = {m: round(us / native[UNIFORM][m], 3) for m, us in native[MIXED].items() if m in native[UNIFORM]}
        found.append({"kernel": SUMMARY, "shape": f"{MIXED} over K5", "ratios": ratios})
    return found


def table(rows: Rows) -> Iterator[str]:
    """Lines of a Markdown table: microseconds, and how many times as long exllamav3 and vLLM in bfloat16 take."""
    rows = list(rows)
    native, *others = (times(rows, kernel) for kernel in ("native", "exllamav3", "vllm_bf16"))
    yield "| | " + " | ".join(f"m={m}" for m in _TOKENS) + " |"
    yield "|---" * (len(_TOKENS) + 1) + "|"
    for shape, cells in native.items():
        yield (
            f"| {shape} | "
            + " | ".join(_cell(cells, [other.get(shape, {}) for other in others], m) for m in _TOKENS)
            + " |"
        )
    yield from (str({key: value for key, value in row.items() if key != "kernel"}) for row in summaries(rows))


def _cell(cells: Mapping[int, float], others: list[dict[int, float]], tokens: int) -> str:
    if tokens not in cells:
        return "–"
    us = cells[tokens]
    text = f"{us:.1f}" if us < 100 else f"{us:.0f}"
    ratios = [f"{other[tokens] / us:.2f}" if tokens in other else "–" for other in others]
    return f"{text} ({' / '.join(ratios)})" if ratios != ["–"] * len(others) else text
