"""The helpers' published contracts, row by row (what an earlier plugin documented of them)."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import vllm_exl3
from vllm_exl3.env_variable import VariableError

GIB = 1 << 30
SCHEDULE = "VLLM_EXL3_SPEC_SCHEDULE"


def test_every_helper_is_there_without_torch() -> None:
    script = (
        "import sys, vllm_exl3\n"
        "for name in vllm_exl3._PLANNING: assert callable(getattr(vllm_exl3, name)), name\n"
        "assert set(vllm_exl3.__all__) <= set(dir(vllm_exl3))\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'plan_everything'"):
        vllm_exl3.plan_everything  # noqa: B018


@pytest.mark.parametrize(
    ("batch", "drafts"), [(0, 0), (1, 3), (4, 3), (5, 2), (8, 2), (9, 1), (16, 1), (17, 0), (10**6, 0)]
)
def test_default_schedule(batch: int, drafts: int) -> None:
    assert vllm_exl3.get_speculative_draft_tokens(batch) == drafts


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("1:4:4,5:10:3", [(1, 4, 4), (5, 10, 3)]),
        (" 9:16:1 , 1:2:5", [(1, 2, 5), (9, 16, 1)]),
        *((bad, [(1, 4, 3), (5, 8, 2), (9, 16, 1)]) for bad in
          ("", ",", "1:2", "1:2:3:4", "a:b:c", "1:4:3,4:8:2", "4:1:3", "0:4:3", "1:4:-1", "1:4:2.5")),
    ],
)  # fmt: skip
def test_schedules_from_text(text: str, schedule: list[tuple[int, int, int]]) -> None:
    assert vllm_exl3.parse_speculative_schedule(text) == schedule


def test_the_default_is_a_copy() -> None:
    vllm_exl3.parse_speculative_schedule("").clear()
    assert vllm_exl3.get_speculative_draft_tokens(1) == 3


def test_schedule_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCHEDULE, "1:2:7,9:9:1")
    assert [vllm_exl3.get_speculative_draft_tokens(batch) for batch in (1, 2, 3, 9, 10)] == [7, 7, 0, 1, 0]
    monkeypatch.setenv(SCHEDULE, "1-2-7")  # the earlier plugin took its default; a typo is an error here
    with pytest.raises(VariableError, match="least:most:drafts"):
        vllm_exl3.parse_speculative_schedule()


@pytest.mark.parametrize(
    ("batch", "schedule", "error"),
    [
        (True, None, TypeError),
        (1.0, None, TypeError),
        (1, [(1, 4, True)], TypeError),
        (1, [(1, 4.0, 2)], TypeError),
        (1, [(1, 4)], ValueError),
        (1, [(4, 1, 2)], ValueError),
        (1, [(1, 4, 2), (4, 5, 1)], ValueError),
        (1, [], ValueError),
    ],
)
def test_wrong_schedules(batch: Any, schedule: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        vllm_exl3.get_speculative_draft_tokens(batch, schedule)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("true", True), ("Yes", True), ("on", True), ("0", False),
                                          ("off", False), ("", False)])  # fmt: skip
def test_adaptive_verification(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv("VLLM_EXL3_ADAPTIVE_VERIFICATION", text)
    assert vllm_exl3.is_adaptive_verification_enabled() is on


def test_adaptive_verification_in_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_exl3.env_unused import unused

    assert not unused()
    monkeypatch.setenv("VLLM_EXL3_ADAPTIVE_VERIFICATION", "1")
    (sentence,) = unused()
    assert "no effect" in sentence and "no hook" in sentence


FILTERS = [
    ([0.9, 0.5, 0.4, 0.8], 0.5, [1, 1, 0, 0], 2),
    ([0.4, 0.9], 0.5, [0, 0], 0),
    ([1.0, 1.0], 1.0, [1, 1], 2),
    ([0.0], 0.0, [1], 1),
    ([math.nan, 0.9], 0.5, [0, 0], 0),
    ([], 0.5, [], 0),
    ([[0.9, 0.9, 0.1], [0.1, 0.9, 0.9]], 0.5, [[1, 1, 0], [0, 0, 0]], [2, 0]),
]


@pytest.mark.parametrize(("probs", "threshold", "mask", "kept"), FILTERS)
def test_filter(probs: Any, threshold: float, mask: Any, kept: Any) -> None:
    found, count = vllm_exl3.filter_speculative_candidates(probs, threshold)
    assert found.dtype == bool and found.tolist() == np.array(mask, bool).tolist()
    assert (count if isinstance(count, int) else count.tolist()) == kept
    as_array = vllm_exl3.filter_speculative_candidates(probs, threshold, return_tensor=True)[1]
    assert not isinstance(as_array, int) and as_array.tolist() == kept


@pytest.mark.parametrize(("probs", "threshold", "mask", "kept"), FILTERS)
def test_filter_of_tensors(probs: Any, threshold: float, mask: Any, kept: Any) -> None:
    torch = pytest.importorskip("torch")
    found, count = vllm_exl3.filter_speculative_candidates(torch.tensor(probs), threshold)
    assert found.dtype == torch.bool and found.tolist() == np.array(mask, bool).tolist()
    assert (count if isinstance(count, int) else count.tolist()) == kept
    assert torch.is_tensor(vllm_exl3.filter_speculative_candidates(torch.tensor(probs), threshold, True)[1])


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan, math.inf, True])
def test_wrong_thresholds(threshold: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        vllm_exl3.filter_speculative_candidates([0.5], threshold)


@pytest.mark.parametrize(("context", "gib"), [(1 << 16, 1.51), (1 << 17, 3.02), (1 << 18, 6.05)])
def test_latent_cache(context: int, gib: float) -> None:
    assert vllm_exl3.compute_mla_kv_cache_bytes(context) / GIB == pytest.approx(gib, abs=0.005)
    assert vllm_exl3.compute_mla_kv_cache_bytes(context, 2, 128, 32, 2) == context * 2 * 160 * 2


@pytest.mark.parametrize(("arguments", "error"), [((1.5,), TypeError), ((True,), TypeError), ((-1,), ValueError),
                                                  ((1, 0), ValueError), ((1, 1, 0), ValueError)])  # fmt: skip
def test_wrong_caches(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        vllm_exl3.compute_mla_kv_cache_bytes(*arguments)


def test_context_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    found = vllm_exl3.validate_context_scaling(1 << 18)
    assert found["usable_mem_gb"] == pytest.approx(115.2) and found["kv_cache_gb"] == pytest.approx(6.047, abs=1e-3)
    assert found["headroom_gb"] == pytest.approx(115.2 - 95.4 - 6.047, abs=1e-3) and found["fits"] is True
    assert found["safety_margin_gb"] == pytest.approx(128 - 95.4 - 6.047, abs=1e-3) and found["chunk_size"] == 2048
    assert vllm_exl3.validate_context_scaling(1 << 20)["fits"] is False
    monkeypatch.setenv("VLLM_EXL3_CONTEXT_TOTAL_MEM_GB", "256")
    monkeypatch.setenv("VLLM_EXL3_TOTAL_MEM_GB", "64")  # the longer name wins
    monkeypatch.setenv("VLLM_EXL3_MEM_UTIL", "0.5")
    found = vllm_exl3.validate_context_scaling(1 << 20)
    assert found["usable_mem_gb"] == 128 and found["fits"] is True


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ({"max_model_len": 0}, None),
        ({"max_model_len": 1024, "mem_util": 1.5}, None),
        ({"max_model_len": 1024, "total_mem_gb": -1}, None),
        ({"max_model_len": 1024, "model_weights_gb": math.nan}, None),
        ({"max_model_len": 1024}, ("VLLM_EXL3_CONTEXT_MEM_UTIL", "2")),
        ({"max_model_len": 1024}, ("VLLM_EXL3_CHUNK_SIZE", "much")),
        ({"max_model_len": 1024}, ("VLLM_EXL3_CONTEXT_MODEL_WEIGHTS_GB", "inf")),
    ],
)
def test_wrong_contexts(monkeypatch: pytest.MonkeyPatch, options: Any, variable: tuple[str, str] | None) -> None:
    if variable:
        monkeypatch.setenv(*variable)
    with pytest.raises(ValueError, match=variable[0] if variable else "out of its domain"):
        vllm_exl3.validate_context_scaling(**options)


WINDOW = {"bits": 2, "codebook": "mcg", "routed_rows": 57344, "hidden_size": 4096, "intermediate_size": 2048,
          "requested": True}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "eligible"),
        ({"requested": False, "bits": 4}, "disabled"),
        ({"bits": 4, "codebook": "mul1"}, "unsupported_bits:4"),
        ({"codebook": "mul1"}, "mul1_not_supported"),
        ({"codebook": "3inst", "hidden_size": 100}, "unsupported_codebook:3inst"),
        ({"hidden_size": 4224}, "hidden_not_multiple_of_256"),
        ({"intermediate_size": 2000}, "intermediate_not_multiple_of_128"),
        ({"routed_rows": 256}, "below_fat_threshold"),
        ({"routed_rows": 257}, "eligible"),
    ],
)
def test_grouped_prefill(changes: dict[str, Any], reason: str) -> None:
    plan = vllm_exl3.plan_grouped_prefill(**{**WINDOW, **changes})
    assert isinstance(plan, vllm_exl3.GroupedPrefillPlan)
    assert (plan.reason, plan.eligible) == (reason, reason == "eligible") and plan.executed


@pytest.mark.parametrize(
    ("rows", "limit", "window", "windows"),
    [(57344, 8192, 8192, 7), (100, 8192, 128, 1), (8193, 8192, 8192, 2), (1000, 100, 64, 16), (1000, 1, 64, 16),
     (0, 8192, 0, 0)],
)  # fmt: skip
def test_windows(rows: int, limit: int, window: int, windows: int) -> None:
    plan = vllm_exl3.plan_grouped_prefill(**{**WINDOW, "routed_rows": rows, "max_rows": limit})
    assert (plan.window_rows, plan.windows) == (window, windows)
    assert plan.scratch_bytes == window * (4096 + 3 * 2048) * 2


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"bits": True}, TypeError),
        ({"routed_rows": 1.0}, TypeError),
        ({"hidden_size": 0}, ValueError),
        ({"max_rows": 0}, ValueError),
    ],
)
def test_wrong_windows(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        vllm_exl3.plan_grouped_prefill(**{**WINDOW, **changes})


GOOD = {"architecture": "Qwen3MoeForCausalLM", "codebooks": ["mul1"], "max_k": 4, "uniform_expert_biases": True,
        "exllamav3_architecture_available": True}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "blockers", "warnings", "route"),
    [
        ({}, 0, 0, "external runtime"),
        ({"architecture": " "}, 1, 0, "blockers"),
        ({"exllamav3_architecture_available": False}, 1, 0, "blockers"),
        ({"exllamav3_architecture_available": None}, 0, 1, "external runtime"),
        ({"codebooks": None}, 1, 0, "mul1 sibling"),
        ({"codebooks": "mcg"}, 1, 0, "mul1 sibling"),
        ({"codebooks": ["mul1", "MCG"]}, 1, 0, "mul1 sibling"),
        ({"codebooks": [" MUL1 ", "mul1"]}, 0, 0, "external runtime"),
        ({"max_k": None}, 0, 1, "external runtime"),
        ({"max_k": True}, 1, 0, "blockers"),
        ({"max_k": 0}, 1, 0, "blockers"),
        ({"max_k": 4.5}, 1, 0, "blockers"),
        ({"max_k": 9}, 1, 0, "blockers"),
        ({"uniform_expert_biases": False}, 1, 0, "blockers"),
        ({"uniform_expert_biases": None}, 0, 1, "external runtime"),
        ({"architecture": "DeepseekV41ForCausalLM", "exllamav3_architecture_available": None}, 0, 1, "standalone port"),
        ({"architecture": "DeepseekV41ForCausalLM"}, 0, 0, "external runtime"),
    ],
)
def test_cpu_offload(changes: dict[str, Any], blockers: int, warnings: int, route: str) -> None:
    plan = vllm_exl3.plan_exllamav3_cpu_offload(**{**GOOD, **changes})
    assert (len(plan.blockers), len(plan.warnings)) == (blockers, warnings) and route in plan.recommended_route
    assert plan.exllamav3_metadata_candidate is (not blockers)
    assert plan.vllm_exl3_execution_available is False and plan.own_executor_available is True
    data = plan.to_dict()
    assert isinstance(data["blockers"], list) and data["codebooks"] == sorted(set(data["codebooks"]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"moe_tp": 1, "local_experts": 96, "local_intermediate": 2304, "backend": "exllamav3"}),
        ({"ep": False}, {"moe_tp": 4, "local_experts": 384, "local_intermediate": 576, "backend": "loop",
                         "native_candidate": False, "intermediate_by_rank": (640, 640, 512, 512)}),
        ({"tp": 2}, {"local_experts": 192, "native_candidate": True}),
        ({"tp": 2, "ep": False}, {"local_intermediate": 1152, "backend": "exllamav3"}),
        ({"tp": 1, "ep": False}, {"local_intermediate": 2304, "intermediate_by_rank": (2304,)}),
    ],
)  # fmt: skip
def test_deepseek_v41(options: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = vllm_exl3.plan_deepseek_v41(**options)
    assert {name: getattr(plan, name) for name in expected} == expected and plan.own_backend == "native"
    assert sum(plan.intermediate_by_rank) == 2304 * (plan.tp if plan.ep else 1)


@pytest.mark.parametrize(("options", "error"), [({"experts": 385}, ValueError), ({"tp": 0}, ValueError),
                                                ({"tp": True}, TypeError), ({"topk": 400}, ValueError),
                                                ({"tp": 5, "ep": False}, ValueError)])  # fmt: skip
def test_wrong_deepseek_v41(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        vllm_exl3.plan_deepseek_v41(**options)
