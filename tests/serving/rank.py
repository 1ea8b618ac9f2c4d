"""One rank of an engine over several processes, started by torchrun: prints greedy tokens."""

import json
import os
import sys

from tests.serving.engine import PROMPTS, engine, generate

if __name__ == "__main__":
    pack, tokens, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    options |= {
        "tensor_parallel_size": int(os.environ["WORLD_SIZE"]),
        "distributed_executor_backend": "external_launcher",
    }
    with engine(pack, **options) as llm:
        continued = generate(llm, PROMPTS, tokens)
        if os.environ["RANK"] == "0":
            print(f"TOKENS {continued}", flush=True)
    os._exit(0)  # vLLM's own shutdown takes seconds and has nothing left to do
