"""Whole models through vLLM on a GPU: exllamav3's logits, graphs against none, a prompt alone against in a batch.

What they measure is that of ``benchmarks/gpu_serve.py``, in a process of its own: some of vLLM's settings are read when
it is imported.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from tests.conftest import GOLDEN_PACKS

ROOT = Path(__file__).parents[2]
PACKS = ROOT / "tests" / "data" / "packs"
WHOLE = ("llama_odd-4.0-mul1", "qwen3_moe-3.0-mul1")


def measured(subject: str, *packs: str) -> list[dict[str, Any]]:
    """The rows that the benchmark prints, one a pack."""
    command = [sys.executable, ROOT / "benchmarks" / "gpu_serve.py", subject, *(PACKS / pack for pack in packs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(rows) == len(packs), done.stderr[-3000:]
    return rows


def test_logits_are_exllamav3s() -> None:
    for row in measured("golden", *GOLDEN_PACKS):
        assert "native" in row["kernel"] and "reference" not in row["kernel"], row
        assert row["error"] <= 2e-3 and row["kl"] <= 1e-4, row
        assert row.get("bfloat16_error", 0) <= 1e-2, row


def test_graphs_give_the_same_tokens() -> None:
    assert [row["equal"] for row in measured("graphs", *WHOLE)] == [True, True]


def test_a_batch_changes_no_bit_of_a_prompt() -> None:
    assert [row["equal"] for row in measured("batch", *WHOLE)] == [True, True]
