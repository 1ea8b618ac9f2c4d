"""`VLLM_EXL3_SPEC_SCHEDULE`: what vLLM's configuration gets, what is refused, and that a server drafts by it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from tests.serving.conftest import PACKS
from tests.serving.engine import PROMPTS, engine, generate
from tests.serving.sampling import lend_kernels
from vllm_exl3 import get_speculative_draft_tokens, register
from vllm_exl3.env_variable import VariableError
from vllm_exl3.plan.speculation import schedule_from_text
from vllm_exl3.serving.speculation import vllm_schedule

NAME = "VLLM_EXL3_SPEC_SCHEDULE"
FIELD = "num_speculative_tokens_per_batch_size"
PACK = PACKS / "llama_odd-4.0-mul1"

lend_kernels()


@pytest.mark.parametrize("text", ["1:4:3,5:8:2", "2:3:1", "1:1:2,3:3:0,6:9:1", "4:4:3"])
def test_vllm_looks_up_the_same_numbers(text: str) -> None:
    schedule = schedule_from_text(text)
    table = build_dynamic_sd_schedule_lookup(vllm_schedule(schedule), 40, 8)
    assert table[1:] == [get_speculative_draft_tokens(batch, schedule) for batch in range(1, 41)]


def _configured(pack: Path = PACK, *, ranks: int = 1, **speculation: Any) -> Any:
    """vLLM's configuration of drafts for a pack, made as `vllm serve` makes it."""
    register()
    options = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, **speculation}
    arguments = EngineArgs(model=str(pack), speculative_config=options)
    parallel = ParallelConfig()
    parallel.data_parallel_size = ranks
    return arguments.create_speculative_config(arguments.create_model_config(), parallel)


def test_a_server_gets_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(_configured(), FIELD) is None
    monkeypatch.setenv(NAME, "1:2:3,4:4:1")
    assert getattr(_configured(), FIELD) == [(1, 2, 3), (3, 3, 0), (4, 4, 1), (5, 1 << 30, 0)]
    same = {FIELD: [[1, 2, 3], [3, 3, 0], [4, 4, 1], [5, 1 << 30, 0]]}
    assert len(getattr(_configured(**same), FIELD)) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_speculative_tokens": 2}, "asks for 3 tokens"),
        ({FIELD: [[1, 8, 1]]}, "both give a schedule"),
        ({"ranks": 2}, "data-parallel-size 2"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv(NAME, "1:2:3")
    with pytest.raises(VariableError, match=said):
        _configured(**options)


def test_other_methods_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_exl3.serving.speculation import _follow

    monkeypatch.setenv(NAME, "1:2:3")
    config = SimpleNamespace(**{FIELD: None}, method="suffix", num_speculative_tokens=8)
    with pytest.raises(VariableError, match="method suffix"):
        _follow(config, SimpleNamespace(data_parallel_size=1))  # type: ignore[arg-type]


def test_without_drafts_a_warning_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm_exl3.serving.speculation import _follow

    monkeypatch.setenv(NAME, "1:2:3")
    _follow(None, SimpleNamespace(data_parallel_size=1))  # type: ignore[arg-type]
    assert "nothing is drafted" in caplog.text


@pytest.mark.slow
def test_drafts_follow_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests draft two tokens each, three draft none, and no token changes."""

    def drafted(llm: Any) -> float:
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return float(metrics["vllm:spec_decode_num_draft_tokens"])

    with engine(PACK) as llm:
        expected = generate(llm, PROMPTS[:3], 24)
    monkeypatch.setenv(NAME, "1:2:2")
    options = {"model": str(PACK), "method": "draft_model", "num_speculative_tokens": 2}
    with engine(PACK, speculative_config=options, disable_log_stats=False) as llm:
        assert generate(llm, PROMPTS[:2], 24) == expected[:2]
        two = drafted(llm)
        assert two > 0
        assert generate(llm, PROMPTS[:3], 24) == expected
        assert drafted(llm) - two < two / 2  # only while fewer than three are left
