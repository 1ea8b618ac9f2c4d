"""One rank of a tensor-parallel engine, started by torchrun: prints the greedy tokens of some prompts."""

import json
import os
import sys

from tests.serving.engine import engine, generate
from tests.serving.test_engine import PROMPTS

if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    options |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "external_launcher"}
    with engine(sys.argv[1], **options) as llm:
        tokens = generate(llm, PROMPTS, 24)
        if os.environ["RANK"] == "0":
            print(f"TOKENS {tokens}", flush=True)
    os._exit(0)  # vLLM's own shutdown takes seconds and has nothing left to do
