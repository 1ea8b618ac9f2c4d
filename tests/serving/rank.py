"""One rank of engines over several processes, started by torchrun: prints the greedy tokens of each, one after another.

With ``data_parallel_size`` each rank has the whole model but experts, and continues its own share of the prompts.
"""

import json
import os
import sys
from typing import Any

import torch.distributed as dist

from tests.serving.engine import PROMPTS, engine, generate
from tests.serving.gloo import lend_collectives


def continued(pack: str, tokens: int, options: dict[str, Any]) -> list[list[int]]:
    """Continuations of `PROMPTS` by an engine over all ranks."""
    world = int(os.environ["WORLD_SIZE"])
    replicas = options.get("data_parallel_size", 1)
    options |= {"tensor_parallel_size": world // replicas, "distributed_executor_backend": "external_launcher"}
    if replicas > 1:
        lend_collectives()
    with engine(pack, **options) as llm:
        replica = llm.llm_engine.vllm_config.parallel_config.data_parallel_rank
        shares: list[Any] = [None] * world
        dist.all_gather_object(shares, (replica, generate(llm, PROMPTS[replica::replicas], tokens)))
    return [dict(shares)[number % replicas][number // replicas] for number in range(len(PROMPTS))]


if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # it has the addresses of the first engine's processes
    for port, *job in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)
        found = continued(*job)
        if os.environ["RANK"] == "0":
            print(f"TOKENS {found}", flush=True)
    os._exit(0)  # vLLM's own shutdown takes seconds and has nothing left to do
