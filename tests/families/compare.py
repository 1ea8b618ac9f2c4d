"""Serves a family's pack and its twin, one after the other, in stock vLLM, and compares what they compute."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import LLM

from tests.families.family import Family, write
from tests.families.vision import Vision, picture
from tests.serving.engine import Prompt, engine, generate, logits_of, model_of
from vllm_exl3.ops import backends
from vllm_exl3.pack import Pack
from vllm_exl3.pack.metadata import architectures
from vllm_exl3.serving.models import install_for
from vllm_exl3.serving.report import reports

__all__ = ["BOUND", "Choice", "Compared", "compare"]

BOUND = 1e-3
"""Relative error of float32 logits: that of 16-bit activations in a few layers."""

PROMPT = [1, 17, 200, 33, 5, 90, 41, 77, 250, 3, 8, 120]
_NEW = 4


@dataclass(frozen=True)
class Choice:
    """The first token at which the pack and its twin continue otherwise, by the twin's logits.

    Attributes:
        index: of the token among the new ones.
        gap: of the twin's logit of its own token over that of the pack's.
        steps: the gap in steps of bfloat16 at that size, in which such classes compute.
        allowed: what the bound of the error allows two logits of that position to move towards each other.
    """

    index: int
    gap: float
    steps: float
    allowed: float

    @property
    def is_tie(self) -> bool:
        """Whether an error within its bound can make the other token the larger one."""
        return self.gap <= self.allowed


@dataclass(frozen=True)
class Compared:
    """What a comparison found.

    Attributes:
        error: relative Frobenius error of all positions' logits.
        worst: that of the position where it is largest.
        bound: of the error; the worst position may have twice as much.
        choice: where both continue the prompt otherwise, or None where they do not.
        kernels: which backend ran each op of the pack's engine, such as ``linear`` to ``native``.
        report: the start-up report of the pack's engine.
    """

    error: float
    worst: float
    bound: float
    choice: Choice | None
    kernels: dict[str, str]
    report: str

    @property
    def same_tokens(self) -> bool:
        """Whether both continue the prompt alike."""
        return self.choice is None

    @property
    def is_served(self) -> bool:
        """Whether the errors are within their bounds, and the tokens equal but for ties."""
        within = self.error <= self.bound and self.worst <= 2 * self.bound
        return within and (self.choice is None or self.choice.is_tie)


def compare(family: Family, folder: Path, start: Callable[..., AbstractContextManager[LLM]] = engine) -> Compared:
    """Write, serve and compare one row of the table.

    Args:
        family: the row.
        folder: where pack and twin are written.
        start: starts an engine for a folder with vLLM's options.
    """
    pack, twin = write(family, folder)
    install_for(architectures(Pack.open(pack).config))  # what vLLM's class lacks, the twin lacks too
    expected = _run(twin, family, start)
    backends.reset_calls()
    found = _run(pack, family, start)
    kernels = {op: backend for op, backend, _ in backends.calls()}
    pairs = list(zip(found.logits, expected.logits, strict=True))
    worst, bound = max(_error(one, other) for one, other in pairs), family.bound or BOUND
    choice = _first_choice(found, expected, bound)
    return Compared(_error(found.logits, expected.logits), worst, bound, choice, kernels, found.report)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


@dataclass(frozen=True)
class _Served:
    """What one engine made of the prompt: logits of its positions and of each new token, the tokens, the report."""

    logits: torch.Tensor
    steps: list[torch.Tensor]
    tokens: list[int]
    report: str


def _first_choice(found: _Served, expected: _Served, bound: float) -> Choice | None:
    """Where the tokens part; logits before that are of the same context."""
    pairs = zip(found.tokens, expected.tokens, strict=True)
    index = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if index is None:
        return None
    logits = expected.steps[index]
    mine, theirs = logits[found.tokens[index]], logits[expected.tokens[index]]
    step = 2.0 ** (math.floor(math.log2(abs(float(theirs)))) - 7)
    gap = float(theirs - mine)
    size = float(logits.square().mean().sqrt())
    return Choice(index, gap, gap / step, 2 * bound * size)


def _prompt(vision: Vision | None) -> Prompt:
    if vision is None:
        return PROMPT
    ids = vision.prompt_ids(PROMPT[:4], PROMPT[4:])
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(vision)}}


def _run(folder: Path, family: Family, start: Callable[..., Any]) -> _Served:
    before = len(reports())
    with start(folder, **family.options) as llm:
        prompt = _prompt(family.vision)
        logits = logits_of(llm, prompt).double()
        with _each_step(llm) as steps:
            (tokens,) = generate(llm, [prompt], _NEW)
    new = reports()[before:]
    assert torch.isfinite(logits).all(), f"{folder}: logits that are no numbers"
    return _Served(logits, steps, tokens, "\n".join(report.text() for report in new))


@contextmanager
def _each_step(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Logits ``[vocabulary]`` that each new token of one request is taken from."""
    model, steps = model_of(llm), []
    original = model.compute_logits

    def record(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = original(hidden_states, *args, **kwargs)
        steps.append(logits[-1].detach().double().clone())
        return logits

    model.compute_logits = record
    try:
        yield steps
    finally:
        model.compute_logits = original
