"""What a running engine says of itself: in-process, through RPC, and in Prometheus' registry."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY, generate_latest

import vllm_exl3
from tests.serving.conftest import PACKS
from tests.serving.engine import engine, generate
from vllm_exl3.ops import backends
from vllm_exl3.serving import metrics
from vllm_exl3.serving.diagnostics import WorkerExtension, worker_diagnostics

QWEN = "qwen3_moe-3.0-mul1"
EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__name__}"


def test_a_worker_says_the_same_as_its_process() -> None:
    with engine(PACKS / QWEN, worker_extension_cls=EXTENSION) as llm:
        generate(llm, [[1, 2, 3]], 2)
        (by_name,) = llm.collective_rpc("exl3_diagnostics")
        (by_function,) = llm.collective_rpc(worker_diagnostics)
        here = vllm_exl3.runtime_diagnostics()
        assert by_name == by_function == here == json.loads(json.dumps(here))
        text = generate_latest(REGISTRY).decode()
    assert here["models"][-1]["pack"] == str(PACKS / QWEN)
    assert here["moe_backend"] in ("native", "reference") and here["native_available"] is (
        here["moe_backend"] == "native"
    )
    assert set(here["native_row_caps"]) == set("12345678")
    offload = here["uva_expert_offload"]
    assert offload["requested"] is False and offload["guard_installed"] is True
    assert set(offload["layers"]) >= {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert here["mixed_k"]["tensor_level_mixed_k_within_layer"] is True
    assert here["environment"]["VLLM_EXL3_REQUIRE_UVA_EXPERTS"] is False
    calls = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in text.splitlines()
        if line.startswith("vllm:exl3_kernel_calls_t")
    }
    key = f'vllm:exl3_kernel_calls_total{{backend="{here["moe_backend"]}",layer_class="RoutedExperts",op="moe"}}'
    assert calls[key] > 0
    assert 'vllm:exl3_weight_bytes{kind="trellis"}' in text and "vllm:exl3_kv_cache_dtype_info{dtype=" in text


def test_counters_of_all_processes_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_METRICS_FOLDER", str(tmp_path))
    monkeypatch.setattr(metrics.report, "_reports", [])
    backends.reset_calls()
    row = ["linear", "native", "QKVParallelLinear", 5]
    for process in (1, 2):
        content = {"calls": [row, ["moe", "reference", "RoutedExperts", process]], "bytes": {"trellis": 7}}
        (tmp_path / f"{process}.json").write_text(json.dumps({**content, "kv_cache_dtypes": ["fp8"]}))
    (tmp_path / "3.json").write_text("{half of a")
    (tmp_path / "4.json").write_text((tmp_path / "1.json").read_text())
    os.utime(tmp_path / "4.json", (1, 1))  # left by a server that ended
    (tmp_path / f"{os.getpid()}.json").write_text("own file, not counted twice")
    found = {metric.name: metric.samples for metric in metrics.Exl3Collector().collect()}
    assert [(s.labels["op"], s.value) for s in found["vllm:exl3_kernel_calls"]] == [("linear", 10), ("moe", 3)]
    assert [(s.labels["op"], s.value) for s in found["vllm:exl3_fallback_calls"]] == [("moe", 3)]
    assert [s.value for s in found["vllm:exl3_weight_bytes"]] == [14]
    assert "fp8" in [s.labels["dtype"] for s in found["vllm:exl3_kv_cache_dtype_info"]]


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "null",
        '{"calls": 1, "bytes": {}, "kv_cache_dtypes": []}',
        '{"calls": [["linear"]], "bytes": {}, "kv_cache_dtypes": []}',
        '{"calls": [["linear", "native", "X", "5"]], "bytes": {}, "kv_cache_dtypes": []}',
        '{"calls": [], "bytes": {"trellis": "much"}, "kv_cache_dtypes": []}',
        '{"calls": [], "bytes": {}, "kv_cache_dtypes": [3]}',
    ],
)
def test_a_file_of_other_contents_does_not_cost_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("VLLM_EXL3_METRICS_FOLDER", str(tmp_path))
    (tmp_path / "1.json").write_text(content)
    backends.reset_calls()
    assert not any(metric.samples for metric in metrics.Exl3Collector().collect() if "calls" in metric.name)


def test_a_model_that_is_gone_takes_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = metrics.report.Report()
    layer = torch.nn.Module()
    model.add_experts("experts", layer, None)
    model.bytes["trellis"] = 5
    monkeypatch.setattr(metrics.report, "_reports", [model])
    assert metrics.snapshot()["bytes"] == {"trellis": 5}
    del layer
    assert metrics.snapshot()["bytes"] == {}


WRITER = """
import time, sys
from pathlib import Path
from vllm_exl3.ops import backends
from vllm_exl3.serving import metrics
metrics._EVERY = 0.05
backends.count_call("linear", "native", "X")
metrics.leave_counters("auto")
metrics.leave_counters("auto")
time.sleep(20)
"""


def test_a_process_leaves_its_counters_in_a_folder_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    environment = {**os.environ, "VLLM_EXL3_METRICS_FOLDER": str(folder)}
    process = subprocess.Popen([sys.executable, "-c", WRITER], env=environment)
    try:
        file = folder / f"{process.pid}.json"
        for _ in range(300):
            if file.exists():
                break
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        assert json.loads(file.read_text())["calls"] == [["linear", "native", "X", 1]]
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        process.kill()
        process.wait()
