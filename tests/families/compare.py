"""Serves a family's pack and its twin, one after the other, in stock vLLM, and compares what they compute."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import LLM

from tests.families.family import Family, write
from tests.families.vision import Vision, picture
from tests.serving.engine import Prompt, engine, generate, logits_of
from vllm_exl3.pack import Pack
from vllm_exl3.serving.models import install_for
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
        bound: of the error; the worst position may have twice as much.
        same_tokens: whether both continue the prompt alike.
        report: the start-up report of the pack's engine.
    """

    error: float
    worst: float
    bound: float
    same_tokens: bool
    report: str


def compare(family: Family, folder: Path, start: Callable[..., AbstractContextManager[LLM]] = engine) -> Compared:
    """Write, serve and compare one row of the table.

    Args:
        family: the row.
        folder: where pack and twin are written.
        start: starts an engine for a folder with vLLM's options.
    """
    pack, twin = write(family, folder)
    install_for(Pack.open(pack).config.get("architectures", ()))  # what vLLM's class lacks, the twin lacks too
    expected, theirs, _ = _run(twin, family, start)
    found, ours, report = _run(pack, family, start)
    worst = max(_error(one, other) for one, other in zip(found, expected, strict=True))
    return Compared(_error(found, expected), worst, family.bound or BOUND, theirs == ours, report)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


def _prompt(vision: Vision | None) -> Prompt:
    if vision is None:
        return PROMPT
    ids = vision.prompt_ids(PROMPT[:4], PROMPT[4:])
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(vision)}}


def _run(folder: Path, family: Family, start: Callable[..., Any]) -> tuple[torch.Tensor, list[list[int]], str]:
    before = len(reports())
    with start(folder, **family.options) as llm:
        prompt = _prompt(family.vision)
        logits = logits_of(llm, prompt).double()
        tokens = generate(llm, [prompt], _NEW)
    new = reports()[before:]
    assert torch.isfinite(logits).all(), f"{folder}: logits that are no numbers"
    return logits, tokens, "\n".join(report.text() for report in new)
