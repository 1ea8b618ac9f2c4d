"""An engine over two pipeline stages, run as a program: prints greedy tokens.

Compiled, since vLLM on CPUs makes the tensors that stages exchange only while it warms up compiled graphs.
"""

import os
import sys

if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_CI_ENV": "0"}
    from tests.serving.engine import PROMPTS, engine, generate

    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": False}
    with engine(sys.argv[1], **options) as llm:
        print(f"TOKENS {generate(llm, PROMPTS, 24)}", flush=True)
