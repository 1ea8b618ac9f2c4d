"""vLLM's own n-gram embedding of Qwen3.8-Flash-Next on an EXL3 table, without the model around it.

Run by torchrun, it prints a digest of what each rank looks up.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.tiny_pack import llama
from vllm_exl3.pack import Pack
from vllm_exl3.pack.codec import decode_ngram
from vllm_exl3.pack.ngram import ngram_ids, read_heads
from vllm_exl3.pack.ngram_rows import NgramRows
from vllm_exl3.tools.random_ngram import write_ngram_table

KEY = "model.layers.1.ple.ple_embedding.ngram_embedding"
EOS = 2
SIZES = (101, 103, 107, 109)
"""What vLLM computes itself for `CONFIG`: the primes after its base."""

MULTIPLIERS = (6148914691236517205, 3074457345618258603, 9007199254740993)
CONFIG = SimpleNamespace(
    ngram_size=3,
    heads_per_ngram=2,
    eos_token_id=EOS,
    vocab_size=640,
    ngram_vocab_size_base=100,
    make_ngram_vocab_size_divisible_by=64,
    split_ngram_parts=4,
)
ROWS = 448
"""The heads' 420 rows, padded as the configuration asks."""

TOKENS = [5, 9, EOS, 9, 600, 601, EOS, EOS, 4, 5, 6, 7, 5, 9, 5, 9]


def write_pack(
    folder: Path, *, shards: int = 4, sizes: tuple[int, ...] = SIZES, indexed: bool = True, seed: int = 0
) -> Path:
    """A tiny pack with an n-gram table in a file of its own, which its index does not list."""
    draft = llama()
    assert draft.config is not None
    draft.config["architectures"] = ["Qwen4ExpForCausalLM"]
    draft.index = indexed
    draft.write(folder)
    write_ngram_table(
        folder / "ngram_table.safetensors", KEY,
        rows=ROWS, bits=5, head_sizes=sizes, multipliers=MULTIPLIERS, shards=shards, seed=seed,
    )  # fmt: skip
    return folder


def wanted(folder: Path, tokens: list[int]) -> torch.Tensor:
    """What the layer must give, by the numpy codec: float16 ``[tokens, heads·160]``."""
    pack = Pack.open(folder)
    stored = pack.ngram_tables[KEY]
    heads = read_heads(pack, stored)
    ids = ngram_ids(tokens, heads, EOS)
    rows = NgramRows(pack, stored).gather(np.arange(stored.rows))[ids]
    bias = np.broadcast_to(heads.bias, (len(tokens), *heads.bias.shape))
    decoded = decode_ngram(rows.reshape(-1, rows.shape[-1]), stored.bits, bias.reshape(-1, 160))
    return torch.from_numpy(decoded).view(len(tokens), -1)


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """vLLM's process groups, over the processes that torchrun started or this one alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.utils.network_utils import get_open_port

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = world
    with set_current_vllm_config(config):
        address = "env://" if world > 1 else f"tcp://127.0.0.1:{get_open_port()}"
        init_distributed_environment(world, rank, address, rank, backend="gloo")
        initialize_model_parallel(world)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def build(folder: Path, *, pinned: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The loaded layer, as vLLM's model builds it; ``pinned`` is what ``--engram-config`` asks for by default."""
    from vllm.config import get_current_vllm_config
    from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpNGramEmbedding

    from vllm_exl3.serving.config import Exl3Config

    config = Exl3Config({})
    config.maybe_update_config(str(folder))
    current = get_current_vllm_config()
    current.engram_config = SimpleNamespace(cpu_offload=pinned)
    module = Qwen4ExpNGramEmbedding(
        CONFIG, 640, 0, 64,
        data_parallel_rank=0, prefix=KEY.removesuffix(".ngram_embedding"), quant_config=config, params_dtype=dtype,
    )  # fmt: skip
    owner = KEY.removesuffix(".ple_embedding.ngram_embedding")
    current.compilation_config.static_forward_context[owner] = SimpleNamespace(ple_embedding=module)
    module.ngram_embedding.quant_method.process_weights_after_loading(module.ngram_embedding)
    return module


def look_up(module: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Embeddings ``[tokens, heads·160]`` of one sequence from its start."""
    ids = torch.tensor(tokens)
    context = torch.full((1, CONFIG.ngram_size - 1), EOS)
    return module(torch.zeros(len(tokens), 1), ids, torch.tensor([0, len(tokens)]), context)


if __name__ == "__main__":
    with ranks():
        layer = build(Path(sys.argv[1]))
        values = look_up(layer, TOKENS)
        rows = layer.ngram_embedding.weight.shape[0]
        print(f"RANK {os.environ['RANK']} {rows} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}", flush=True)
