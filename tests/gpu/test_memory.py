"""What a served pack takes of a GPU's memory, from the allocator: the pack's bytes, and little else that stays."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_serve_memory import measure_memory

from tests.gpu.engines import serving
from tests.serving.engine import PROMPTS, generate
from vllm_exl3.tools.random_pack import write_random_pack

MIB = 1 << 20


def test_a_pack_takes_its_bytes_and_64_mib(tmp_path: Path) -> None:
    shape = {"hidden": 2048, "intermediate": 6144, "layers": 8, "heads": 16, "kv_heads": 4, "head_dim": 128}
    pack = write_random_pack(tmp_path / "pack", **shape, vocab=32000, bits=lambda key: 3 + len(key) % 3)
    with ExitStack() as stack:
        options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 256 * MIB, "max_num_batched_tokens": 512}
        _, row = measure_memory(
            lambda folder: stack.enter_context(serving(folder, **options)),
            pack,
            lambda llm: [generate(llm, prompts, 8) for prompts in (PROMPTS[:1], PROMPTS, [list(range(1, 100))] * 4)],
        )
    assert row["model_bytes"] <= 1.02 * row["packed_bytes"]
    assert row["other_bytes"] <= 64 * MIB  # vLLM's own buffers are in it, too
