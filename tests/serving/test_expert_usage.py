"""Routing statistics: what is counted, what is left out, and what reaches the file."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.serving.by_address import pretend_gpu
from tests.serving.conftest import PACKS
from tests.serving.engine import PROMPTS, engine, generate
from vllm_exl3.plan.expert_usage import read_usage
from vllm_exl3.serving import expert_usage
from vllm_exl3.serving.expert_usage import UsageRecorder

QWEN = "qwen3_moe-3.0-mul1"


class Owner:
    pass


def served(monkeypatch: pytest.MonkeyPatch, metadata: object) -> None:
    """Let forwards be real ones, or those that vLLM invents."""
    monkeypatch.setattr(expert_usage, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(expert_usage, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_counted_by_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    recorder, owner = UsageRecorder(tmp_path / "usage.json"), Owner()
    first, second = recorder.counter("a", 4, owner), recorder.counter("b", 4, owner)
    served(monkeypatch, {})
    recorder.look()
    ids = torch.tensor([[0, 3], [3, 1], [-1, 4], [2**31 - 1, 3]], dtype=dtype)
    first.count(ids)
    recorder.flush()
    assert read_usage(tmp_path / "usage.json") == {"a": [1, 1, 0, 3]}
    first.count(ids)
    second.count(ids[:1])
    recorder.flush()
    recorder.flush()
    assert read_usage(tmp_path / "usage.json") == {"a": [2, 2, 0, 6], "b": [1, 0, 0, 1]}


def test_invented_tokens_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of measuring memory; and a rank without work, whose forwards look the same later, takes nothing back."""
    recorder, owner = UsageRecorder(tmp_path / "usage.json"), Owner()
    counter = recorder.counter("a", 2, owner)
    served(monkeypatch, None)
    counter.count(torch.zeros((100, 1), dtype=torch.int64))
    recorder.flush()
    assert read_usage(tmp_path / "usage.json") is None
    served(monkeypatch, {})
    counter.count(torch.tensor([[1]]))
    served(monkeypatch, None)
    counter.count(torch.tensor([[0]]))
    recorder.flush()
    assert read_usage(tmp_path / "usage.json") == {"a": [1, 1]}
    recorder._invented = True  # as a capture notes
    counter.count(torch.tensor([[0]]))
    recorder.flush()
    assert read_usage(tmp_path / "usage.json") == {"a": [1, 1]}


def test_a_layer_that_is_gone_is_written_once_more_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, owner = UsageRecorder(tmp_path / "usage.json"), Owner()
    served(monkeypatch, {})
    recorder.look()
    recorder.counter("a", 2, owner).count(torch.tensor([[1]]))
    del owner
    gc.collect()
    recorder.flush()
    assert read_usage(tmp_path / "usage.json") == {"a": [0, 1]} and not recorder._counters


def test_a_folder_that_went_away_costs_the_counts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, owner = UsageRecorder(tmp_path / "gone" / "usage.json"), Owner()
    served(monkeypatch, {})
    recorder.look()
    recorder.counter("a", 2, owner).count(torch.tensor([[1]]))
    recorder.flush()
    assert "routing statistics were not written" in caplog.text


@pytest.mark.slow
def test_an_engine_counts_its_tokens_and_the_next_keeps_the_most_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_exl3 import runtime_diagnostics

    pretend_gpu(monkeypatch)
    file = tmp_path / "usage.json"
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_STATS", str(file))
    with engine(PACKS / QWEN) as llm:
        expert_usage.recorder().look()
        before = generate(llm, PROMPTS, 8)
        expert_usage.recorder().flush()
    usage = read_usage(file)
    tokens = sum(map(len, PROMPTS)) + 7 * len(PROMPTS)
    assert {sum(counts) for counts in usage.values()} == {2 * tokens} and len(usage) == 2
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", "0.0002")
    with engine(PACKS / QWEN) as llm:
        assert generate(llm, PROMPTS, 8) == before
    tiers = runtime_diagnostics()["models"][-1]["tiers"]
    assert str(file) in tiers["chosen_by"] and tiers["host_bytes"] and tiers["gpu_bytes"]
