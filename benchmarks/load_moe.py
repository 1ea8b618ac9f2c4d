"""How long vLLM takes to load a MoE pack of 300,000 tensors, and how much of that is this package's own.

Writes a pack of 48 layers × 512 experts with random contents and the smallest legal widths (so that
per-tensor costs show and bytes do not), loads it with a stock engine on the CPU, and splits the time:
reading (opening the pack and iterating over its tensors without a model), this package (checking,
building parameters, copying) and the rest of vLLM. Target: 120 s of own time beyond reading.

    python benchmarks/load_moe.py [--layers 48] [--experts 512] [--write]
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

from vllm_exl3.pack.bfloat16 import to_bfloat16
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.pack_writer import PackTensor, linear_tensors, write_pack
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results/cpu/load.json"
COMMAND = "python benchmarks/load_moe.py --write"
WIDTH = 128
HEADS, HEAD_DIM, VOCABULARY = 4, 32, 128


def generate(folder: Path, layers: int, experts: int) -> int:
    """Write the pack and return how many tensors it has."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, WIDTH * WIDTH // 2, dtype=np.uint16)
    scales = np.where(noise[:WIDTH] % 2, 1, -1).astype(np.float16)

    def linear(key: str, bits: int) -> list[PackTensor]:
        values = {"suh": scales * np.float16(0.1), "svh": scales, "trellis": noise[: WIDTH * WIDTH * bits // 16]}
        return linear_tensors(
            key,
            in_features=WIDTH,
            out_features=WIDTH,
            half_bits=2 * bits,
            codebook=Codebook.MUL1,
            make=values.__getitem__,
        )

    def dense(name: str, *shape: int) -> PackTensor:
        return PackTensor(name, "BF16", shape, lambda: to_bfloat16(np.full(shape, 0.02, np.float32)))

    tensors = [dense("model.embed_tokens.weight", VOCABULARY, WIDTH), dense("model.norm.weight", WIDTH)]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors += [dense(f"{prefix}.{name}_layernorm.weight", WIDTH) for name in ("input", "post_attention")]
        tensors += [dense(f"{prefix}.self_attn.{name}_norm.weight", HEAD_DIM) for name in "qk"]
        tensors.append(dense(f"{prefix}.mlp.gate.weight", experts, WIDTH))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors += linear(f"{prefix}.self_attn.{name}", 2)
        for expert in range(experts):
            for part, name in enumerate(("gate_proj", "up_proj", "down_proj")):
                tensors += linear(f"{prefix}.mlp.experts.{expert}.{name}", 1 + (expert + part) % 3)
    tensors += linear("lm_head", 4)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCABULARY,
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "num_experts": experts,
        "num_experts_per_tok": 10, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    write_pack(
        folder,
        config=config,
        quantization={"quant_method": "exl3", "version": "1.6.5", "bits": 2.0, "head_bits": 4, "codebook": "mul1"},
        tensors=tensors,
        max_shard_bytes=64 << 20,
    )
    return len(tensors)


class Clock:
    """Adds up the time spent in functions, without what they wait for from other measured ones."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._nested: list[float] = []

    def wrap(self, owner: Any, name: str, step: str) -> None:
        """Count a function or generator function of a class or module under ``step``."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            return self.call(step, original, *args, **kwargs)

        setattr(owner, name, timed)

    def call(self, step: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function, counting its time."""
        begin = time.perf_counter()
        self._nested.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            spent = time.perf_counter() - begin
            self.seconds[step] += spent - self._nested.pop()
            if self._nested:
                self._nested[-1] += spent


def time_expert_loaders(clock: Clock) -> None:
    """Count each layer's ``load_weights`` without the iterator that feeds it."""
    from vllm_exl3.serving import moe

    make = moe.expert_loader

    def timed(layer: Any) -> Callable[[Iterable[tuple[str, Any]]], Iterator[str]]:
        load = make(layer)

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Iterator[str]:
            source = iter(weights)
            end = object()

            def feed() -> Iterator[tuple[str, Any]]:
                while (item := clock.call("feeding", next, source, end)) is not end:
                    yield item

            names = load(feed())
            while (name := clock.call("load", next, names, None)) is not None:
                yield name

        return load_weights

    moe.expert_loader = timed


def measure(folder: Path) -> dict[str, float]:
    """Load the pack once; seconds by step."""
    from vllm import LLM
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    from vllm_exl3.pack import Pack
    from vllm_exl3.serving import config, moe

    begin = time.perf_counter()
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    total = sum(int(tensor.reshape(-1)[0] != 0) for _, tensor in safetensors_weights_iterator(files, False))
    read = time.perf_counter()
    Pack.open(folder)  # what the engine finds again
    opened = time.perf_counter()
    clock = Clock()
    clock.wrap(config.Exl3Config, "maybe_update_config", "check")
    clock.wrap(config.Exl3Config, "verify_names", "check")
    clock.wrap(config.Exl3Config, "get_quant_method", "build")
    clock.wrap(moe.Exl3MoEMethod, "create_weights", "build")
    clock.wrap(moe.Exl3MoEMethod, "process_weights_after_loading", "finish")
    time_expert_loaders(clock)
    llm = LLM(
        str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_batched_tokens=64,
        max_num_seqs=1, dtype="bfloat16", distributed_executor_backend="uni",
    )  # fmt: skip
    done = time.perf_counter()
    assert total and llm is not None
    steps = {step: clock.seconds[step] for step in ("check", "build", "load", "finish")}
    return {"read": read - begin, "open": opened - read, **steps, "engine": done - opened}


def main() -> None:
    """Generate, measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "pack"
        count = generate(folder, arguments.layers, arguments.experts)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        seconds = measure(folder)
    seconds["own"] = sum(seconds[step] for step in ("open", "check", "build", "load", "finish"))
    print(f"{count} tensors in {size / 2**20:.0f} MiB")
    for step, spent in seconds.items():
        print(f"{step:>8} {spent:8.2f} s")
    if arguments.write:
        rows = [
            {"kernel": f"moe_{step}", "tensors": count, "us": round(spent * 1e6, 1), "command": COMMAND}
            for step, spent in seconds.items()
        ]
        steps = {row["kernel"] for row in rows}
        write_results(RESULTS, rows, machine="cpu", command=COMMAND, replaces=lambda row: row["kernel"] in steps)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes seconds and has nothing left to do
