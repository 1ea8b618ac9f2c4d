"""The child process of `vllm_exl3.verify.canary`: continues fixed prompts greedily with stock vLLM, and writes JSON.

``python -m vllm_exl3.serving.canary PACK OUT PROMPTS TOKENS``, with the prompts as a JSON list of lists of token ids.
"""

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run the prompts and write, for each, the tokens and their log probabilities (null if not finite)."""
    from vllm import LLM, SamplingParams

    pack, out, prompts, tokens = arguments[0], Path(arguments[1]), json.loads(arguments[2]), int(arguments[3])
    length = max(map(len, prompts)) + tokens
    llm = LLM(
        pack,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=length,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=max(2048, length),
        enable_prefix_caching=False,
        seed=0,
    )
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    out.write_text(json.dumps([_as_dict(output.outputs[0]) for output in outputs]))


def _as_dict(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    chosen = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": [value if abs(value) < float("inf") else None for value in chosen]}


if __name__ == "__main__":
    main(sys.argv[1:])
