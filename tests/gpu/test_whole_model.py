"""Whole models through vLLM on a GPU: exllamav3's logits, graphs against none, a prompt alone against in a batch.

What they measure is that of ``benchmarks/gpu_serve.py``. Batch invariance is asked for in a process of its own, since
vLLM reads that when it is imported.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_serve

from tests.conftest import GOLDEN_PACKS

ROOT = Path(__file__).parents[2]
PACKS = ROOT / "tests" / "data" / "packs"
WHOLE = ("llama_odd-4.0-mul1", "qwen3_moe-3.0-mul1")


@pytest.mark.parametrize("pack", GOLDEN_PACKS)
def test_logits_are_exllamav3s(pack: str) -> None:
    row = gpu_serve.golden(PACKS / pack)
    assert "native" in row["kernel"] and "reference" not in row["kernel"], row
    assert row["error"] <= 2e-3 and row["kl"] <= 1e-4, row
    assert row.get("bfloat16_error", 0) <= 1e-2, row


@pytest.mark.parametrize("pack", WHOLE)
def test_graphs_give_the_same_tokens(pack: str) -> None:
    assert gpu_serve.graphs(PACKS / pack)["equal"]


@pytest.mark.parametrize("pack", WHOLE)
def test_a_batch_changes_no_bit_of_a_prompt(pack: str) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "gpu_serve.py", "batch", PACKS / pack]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(rows) == 1, done.stderr[-3000:]
    assert rows[0]["equal"], rows
