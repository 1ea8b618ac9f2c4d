"""A greedy canary: a pack served by vLLM twice, each time in a process of its own, must give the same tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from vllm_exl3.verify.finding import Finding

__all__ = ["PROMPT_LENGTHS", "run_canary"]

PROMPT_LENGTHS = (3, 17)
_TOKENS = 16

_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

pack, prompts, tokens = json.loads(sys.argv[1])
llm = LLM(pack, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_batched_tokens=64,
          max_num_seqs=2, seed=0, enable_prefix_caching=False)
settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings)
print("CANARY " + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]), flush=True)
"""


def run_canary(pack: str, vocabulary: int, timeout: float = 1800) -> tuple[list[list[int]], list[Finding]]:
    """Serve two prompts greedily, twice.

    Args:
        pack: the pack's folder.
        vocabulary: tokens that the prompts are chosen from.
        timeout: seconds that one start may take.

    Returns:
        The tokens of the first run (none if it failed) and the faults.
    """
    prompts = [[(7 + 31 * place) % vocabulary for place in range(length)] for length in PROMPT_LENGTHS]
    runs = []
    for number in (1, 2):
        tokens, error = _run(pack, prompts, timeout)
        if tokens is None:
            return [], [Finding("canary", f"run {number}", error, f"{_TOKENS} greedy tokens for each prompt from vLLM")]
        runs.append(tokens)
    if runs[0] == runs[1]:
        return runs[0], []
    place = next(
        (prompt, token)
        for prompt, (one, other) in enumerate(zip(*runs, strict=True))
        for token, pair in enumerate(zip(one, other, strict=True))
        if pair[0] != pair[1]
    )
    found = f"other tokens in the second run from token {place[1]} of prompt {place[0]} on"
    return runs[0], [Finding("canary", "two equal greedy runs", found, "the same tokens")]


def _run(pack: str, prompts: Sequence[Sequence[int]], timeout: float) -> tuple[list[list[int]] | None, str]:
    # With the engine's core in the same process, stopping this one leaves nothing behind.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [sys.executable, "-c", _PROGRAM, json.dumps([pack, prompts, _TOKENS])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout:.0f} s"
    line = next((line for line in done.stdout.splitlines() if line.startswith("CANARY ")), None)
    if line is None:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        return None, f"exit status {done.returncode}: {last[-300:]}"
    tokens: list[list[int]] = json.loads(line.removeprefix("CANARY "))
    return tokens, ""
