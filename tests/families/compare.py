"""Serves a family's pack and its twin, one after the other, in stock vLLM on a CPU, and compares what they compute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.families.family import Family, write
from tests.serving.engine import engine, generate, logits_of
from vllm_exl3.serving.report import reports

__all__ = ["BOUND", "Compared", "compare"]

BOUND = 1e-3
"""Relative error of float32 logits: that of 16-bit activations in a few layers."""

PROMPT = [1, 17, 200, 33, 5, 90, 41, 77, 250, 3, 8, 120]
_NEW = 4


@dataclass(frozen=True)
class Compared:
    """What a comparison found.

    Attributes:
        error: relative Frobenius error of all positions' logits.
        worst: that of the position where it is largest.
        same_tokens: whether both continue the prompt alike.
        report: the start-up report of the pack's engine.
    """

    error: float
    worst: float
    same_tokens: bool
    report: str


def compare(family: Family, folder: Path) -> Compared:
    """Write, serve and compare one row of the table."""
    pack, twin = write(family, folder)
    expected, theirs, _ = _run(twin, family.options)
    found, ours, report = _run(pack, family.options)
    difference = torch.linalg.norm(found - expected, dim=-1) / torch.linalg.norm(expected, dim=-1)
    error = float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))
    return Compared(error, float(difference.max()), theirs == ours, report)


def _run(folder: Path, options: Any) -> tuple[torch.Tensor, list[list[int]], str]:
    before = len(reports())
    with engine(folder, **options) as llm:
        logits = logits_of(llm, PROMPT).double()
        tokens = generate(llm, [PROMPT], _NEW)
    new = reports()[before:]
    assert torch.isfinite(logits).all(), f"{folder}: logits that are no numbers"
    return logits, tokens, "\n".join(report.text() for report in new)
