"""A greedy canary: fixed prompts through stock vLLM in two processes, one after the other.

It finds a pack that vLLM cannot load, logits that are not finite, tokens outside of the vocabulary, and answers that
differ from one start to the next. It says nothing about the answers' quality.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_exl3.tools.logs import exceptions_in
from vllm_exl3.verify.finding import Finding

__all__ = ["Canary", "compare_runs", "prompts", "run_canary"]

TOKENS = 16
"""Tokens that each prompt is continued by."""

_LENGTHS = (1, 5, 17, 40)
_PATIENCE = 10.0
_POLL = 0.25

Run = list[dict[str, Any]]


@dataclass(frozen=True)
class Canary:
    """The result of two runs.

    Attributes:
        findings: the faults.
        runs: for each run and prompt, ``tokens`` and ``logprobs``.
        seconds: wall time of each run.
    """

    findings: list[Finding]
    runs: list[Run]
    seconds: list[float]

    def figures(self) -> dict[str, Any]:
        """Entries of the report beside the findings."""
        tokens = [answer["tokens"] for answer in self.runs[0]] if self.runs else []
        return {"runs": len(self.runs), "tokens": tokens, "seconds": self.seconds}


def prompts(vocabulary: int) -> list[list[int]]:
    """Prompts of a few lengths, the same for every pack of one vocabulary size."""
    draw = np.random.default_rng(0)
    return [[int(token) for token in draw.integers(0, vocabulary, length)] for length in _LENGTHS]


def run_canary(
    pack: Path,
    vocabulary: int,
    *,
    timeout: float = 1800.0,
    progress: Callable[[float], None] = lambda runs: None,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "vllm_exl3.serving.canary"),
) -> Canary:
    """Run the prompts twice.

    Args:
        pack: the pack's folder.
        vocabulary: tokens that the model has.
        timeout: seconds that one run may take.
        progress: called after each run, with 1.
        environment: the child's environment variables; this process' by default.
        command: what runs the prompts; the four arguments of `vllm_exl3.serving.canary` are added to it.

    Returns:
        The comparison. A run that fails is a finding, and no other follows it.
    """
    runs: list[Run] = []
    seconds: list[float] = []
    asked = prompts(vocabulary)
    with tempfile.TemporaryDirectory(prefix="vllm-exl3-canary-") as folder:
        for number in (1, 2):
            start, out = time.monotonic(), Path(folder, f"{number}.json")
            arguments = [*command, str(pack), str(out), json.dumps(asked), str(TOKENS)]
            fault = _run(arguments, Path(folder, f"{number}.log"), environment, timeout)
            seconds.append(time.monotonic() - start)
            if fault is None and not out.exists():
                fault = "it ended without an answer"
            if fault is not None:
                return Canary([Finding("canary", f"run {number}", fault, "answers from vLLM")], runs, seconds)
            runs.append(json.loads(out.read_text()))
            progress(1)
    return Canary(compare_runs(runs, vocabulary), runs, seconds)


def _run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None, timeout: float) -> str | None:
    """Run a command in a session of its own, of which nothing remains; why it failed, or None."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment), start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"no answer in {timeout:.0f} s{_last_words(log)}"
    finally:
        _end(process)
    return None if code == 0 else f"exit status {code}{_last_words(log)}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and what it has started: vLLM's engine is a process of its own.

    The session's group exists for as long as it has a member, so that its number belongs to no one else.
    """
    deadline = time.monotonic() + _PATIENCE
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(_POLL)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    words = exceptions_in(text)[:2] or text.strip().splitlines()[-1:]
    return f": {'; '.join(words)}" if words else ""


def compare_runs(runs: Sequence[Run], vocabulary: int) -> list[Finding]:
    """The faults in what two runs answered."""
    findings = []
    for prompt, answers in enumerate(zip(*runs, strict=True)):
        where = f"prompt {prompt}"
        for number, answer in enumerate(answers, 1):
            lost = [place for place, value in enumerate(answer["logprobs"]) if value is None]
            outside = [token for token in answer["tokens"] if not 0 <= token < vocabulary]
            if lost:
                found = f"run {number}: a log probability that is not finite at token {lost[0]}"
                findings.append(Finding("canary", where, found, "finite logits"))
            if outside:
                found = f"run {number}: token {outside[0]}"
                findings.append(Finding("canary", where, found, f"tokens below {vocabulary}"))
        one, other = (answer["tokens"] for answer in answers)
        if one != other:
            same = (mine == theirs for mine, theirs in zip(one, other, strict=False))
            place = next((at for at, equal in enumerate(same) if not equal), min(len(one), len(other)))
            findings.append(Finding("canary", where, f"the runs differ from token {place} on", "the same tokens twice"))
    return findings
