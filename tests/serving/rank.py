"""One rank of an engine over several processes, started by torchrun: prints greedy tokens.

With ``data_parallel_size`` each rank has the whole model but experts, and continues its own share of the prompts.
"""

import json
import os
import sys

import torch.distributed as dist

from tests.serving.engine import PROMPTS, engine, generate
from tests.serving.gloo import lend_collectives

if __name__ == "__main__":
    pack, tokens, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    replicas = options.get("data_parallel_size", 1)
    options |= {"tensor_parallel_size": world // replicas, "distributed_executor_backend": "external_launcher"}
    if replicas > 1:
        lend_collectives()
    with engine(pack, **options) as llm:
        replica = llm.llm_engine.vllm_config.parallel_config.data_parallel_rank
        shares = [None] * world
        dist.all_gather_object(shares, (replica, generate(llm, PROMPTS[replica::replicas], tokens)))
        if rank == 0:
            continued = [dict(shares)[number % replicas][number // replicas] for number in range(len(PROMPTS))]
            print(f"TOKENS {continued}", flush=True)
    os._exit(0)  # vLLM's own shutdown takes seconds and has nothing left to do
