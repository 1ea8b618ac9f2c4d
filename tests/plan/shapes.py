"""Packs of full size without contents, for plans: headers only, no disk space."""

from pathlib import Path

from vllm_exl3.pack.pack import Pack
from vllm_exl3.tools.random_pack import write_random_pack

LLAMA_8B = {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128,
            "vocab": 128256}  # fmt: skip
"""The shape of benchmarks/results/h200/serve.json and h200-x2/two.json."""

EXPERTS = {"hidden": 2048, "intermediate": 768, "layers": 4, "heads": 32, "kv_heads": 4, "head_dim": 128,
           "vocab": 151936, "architecture": "Qwen3MoeForCausalLM", "experts": 128, "top_k": 8}  # fmt: skip
"""A layer of Qwen3-30B-A3B, four of them."""


def hollow(folder: Path, **shape: object) -> Pack:
    """A pack of this shape, opened."""
    options = {"bits": 4, "head_bits": 6, **shape}
    return Pack.open(write_random_pack(folder, hollow=True, **options))  # type: ignore[arg-type]
