"""The canary's verdicts on answers and on children that fail; the slow test runs vLLM."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import DATA
from vllm_exl3.verify.canary import TOKENS, compare_runs, prompts, run_canary

GOOD = {"tokens": [3, 4, 5], "logprobs": [-0.1, -0.2, -0.3]}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (GOOD, []),
        ({**GOOD, "tokens": [3, 9, 5]}, ["the runs differ from token 1 on"]),
        ({**GOOD, "tokens": [3, 4], "logprobs": [-0.1, -0.2]}, ["the runs differ from token 2 on"]),
        ({**GOOD, "logprobs": [-0.1, None, -0.3]}, ["run 2: a log probability that is not finite at token 1"]),
        ({**GOOD, "tokens": [3, 4, 10]}, ["run 2: token 10", "the runs differ from token 2 on"]),
    ],
)
def test_answers_are_judged(answer: dict, found: list[str]) -> None:
    findings = compare_runs([[GOOD], [answer]], vocabulary=10)
    assert [finding.found for finding in findings] == found
    assert all(finding.where == "prompt 0" for finding in findings)


def test_prompts_are_fixed_and_in_the_vocabulary() -> None:
    assert prompts(100) == prompts(100) != prompts(101)
    assert all(0 <= token < 100 for prompt in prompts(100) for token in prompt)


def child(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(
        "import json, os, pathlib, subprocess, sys, time\npack, out, prompts, count = sys.argv[1:]\n" + body
    )
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("raise ValueError('no such model')", "exit status 1: ValueError: no such model"),
        ("sys.exit(0)", "it ended without an answer"),
        ("time.sleep(60)", "no answer in 1 s"),
    ],
)
def test_a_child_that_fails_is_a_finding(body: str, found: str, tmp_path: Path) -> None:
    result = run_canary(tmp_path, 10, timeout=1.0, command=child(tmp_path, body))
    assert [(finding.where, finding.found) for finding in result.findings] == [("run 1", found)]
    assert result.runs == [] and len(result.seconds) == 1


def test_two_runs_that_differ_are_found_and_leave_no_process(tmp_path: Path) -> None:
    body = """
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(pack, "grandchildren").open("a").write(f"{started.pid}\\n")
answers = [{"tokens": [int(pathlib.Path(out).stem)], "logprobs": [-1.0]} for _ in json.loads(prompts)]
pathlib.Path(out).write_text(json.dumps(answers))
"""
    done: list[float] = []
    result = run_canary(tmp_path, 10, command=child(tmp_path, body), progress=done.append)
    assert {finding.found for finding in result.findings} == {"the runs differ from token 0 on"}
    assert done == [1, 1]
    for pid in (tmp_path / "grandchildren").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.slow
def test_vllm_answers_the_same_twice() -> None:
    pack = DATA / "packs" / "llama_tied-3.0-mul1"
    vocabulary = json.loads((pack / "config.json").read_text())["vocab_size"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    result = run_canary(pack, vocabulary, environment=environment)
    assert result.findings == []
    assert [len(run) for run in result.runs] == [len(prompts(vocabulary))] * 2
    assert all(len(answer["tokens"]) == TOKENS for run in result.runs for answer in run)
