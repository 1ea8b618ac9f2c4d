"""What a running engine says of itself: in-process, through RPC, and in Prometheus' registry."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

import vllm_exl3
from tests.serving.conftest import PACKS
from tests.serving.engine import engine, generate
from vllm_exl3.ops import backends
from vllm_exl3.serving import metrics, metrics_shared
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
    assert here["spec_schedule"] == "<default>" and here["fused_temp_rows_override_active"] is False
    assert here["deepseek_v41"]["recommended_tp4_ep4"]["local_experts"] == 96
    assert here["cpu_offload"]["execution_available"] is False and here["grouped_prefill"]["supported_bits"][-1] == 8
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
        content |= {"kv_cache_dtypes": ["fp8"], "reconstructed": 10 * process}
        (tmp_path / f"{process}.json").write_text(json.dumps(content))
    (tmp_path / "3.json").write_text("{half of a")
    (tmp_path / "4.json").write_text((tmp_path / "1.json").read_text())
    os.utime(tmp_path / "4.json", (1, 1))  # left by a server that ended
    (tmp_path / f"{os.getpid()}.json").write_text("own file, not counted twice")
    found = {metric.name: metric.samples for metric in metrics.Exl3Collector().collect()}
    assert [(s.labels["op"], s.value) for s in found["vllm:exl3_kernel_calls"]] == [("linear", 10), ("moe", 3)]
    assert [(s.labels["op"], s.value) for s in found["vllm:exl3_fallback_calls"]] == [("moe", 3)]
    assert [s.value for s in found["vllm:exl3_reconstructed_bytes"]] == [30]
    assert [s.value for s in found["vllm:exl3_weight_bytes"]] == [14]
    assert "fp8" in [s.labels["dtype"] for s in found["vllm:exl3_kv_cache_dtype_info"]]


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "null",
        '{"calls": 1, "bytes": {}, "kv_cache_dtypes": [], "reconstructed": 0}',
        '{"calls": [["linear"]], "bytes": {}, "kv_cache_dtypes": [], "reconstructed": 0}',
        '{"calls": [["linear", "native", "X", "5"]], "bytes": {}, "kv_cache_dtypes": [], "reconstructed": 0}',
        '{"calls": [], "bytes": {"trellis": "much"}, "kv_cache_dtypes": [], "reconstructed": 0}',
        '{"calls": [], "bytes": {}, "kv_cache_dtypes": [3], "reconstructed": 0}',
        '{"calls": [["linear", "native", "X", 5]], "bytes": {}, "kv_cache_dtypes": [], "reconstructed": "much"}',
        pytest.param("[" * 100_000, id="nested too deep"),
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
time.sleep(0.3)
backends.count_call("linear", "native", "X")
backends.count_call("linear", "reference", "X")
backends.count_reconstructed(7)
time.sleep(180)
"""


@contextlib.contextmanager
def writing(**variables: str) -> Iterator[subprocess.Popen]:
    """A process that leaves its counters."""
    process = subprocess.Popen([sys.executable, "-c", WRITER], env={**os.environ, **variables})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    for _ in range(1200):  # it imports vLLM, on whatever else the machine does
        if condition():
            return
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    raise AssertionError("not in two minutes")


def test_a_process_leaves_its_counters_in_a_folder_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    with writing(VLLM_EXL3_METRICS_FOLDER=str(folder)) as process:
        file = folder / f"{process.pid}.json"
        until(process, file.exists)
        until(process, lambda: len(json.loads(file.read_text())["calls"]) == 2)
        assert json.loads(file.read_text())["calls"] == [["linear", "native", "X", 2], ["linear", "reference", "X", 1]]
        assert folder.stat().st_mode & 0o777 == 0o700


ENDING = """
import shutil, sys, threading
from vllm_exl3.serving import metrics
metrics._EVERY = 0.001
original = shutil.rmtree
def slowly(folder, **options):
    original(folder, **options)
    threading.Event().wait(0.3)  # the other thread may write meanwhile
    print("left", folder.exists())
metrics.shutil.rmtree = slowly
metrics.register_metrics()
metrics.leave_counters("auto")
threading.Event().wait(0.3)
"""


def test_a_process_that_ends_says_nothing_of_its_counters() -> None:
    """Its folder is gone then, which is no fault of anyone's."""
    environment = {name: value for name, value in os.environ.items() if "METRICS_FOLDER" not in name}
    ended = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, check=True)
    said = [line for line in ended.stderr.splitlines() if "processors" not in line]  # of a busy machine
    assert (ended.stdout, said) == ("left False\n", [])


def test_with_several_front_processes_prometheus_adds_up(tmp_path: Path) -> None:
    """vLLM answers from these files then, and never asks the collector."""
    (files := tmp_path / "prometheus").mkdir()
    variables = {"VLLM_EXL3_METRICS_FOLDER": str(tmp_path / "own"), "PROMETHEUS_MULTIPROC_DIR": str(files)}

    def found() -> dict[str, float]:
        MultiProcessCollector(registry := CollectorRegistry(), path=str(files))
        lines = [line.rpartition(" ") for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    fallbacks = 'vllm:exl3_fallback_calls_total{op="linear"}'
    with writing(**variables) as first, writing(**variables) as second:
        for process in (first, second):
            until(process, lambda: found().get(fallbacks) == 2)
        assert found() == {
            'vllm:exl3_kernel_calls_total{backend="native",layer_class="X",op="linear"}': 4,
            'vllm:exl3_kernel_calls_total{backend="reference",layer_class="X",op="linear"}': 2,
            fallbacks: 2,
            "vllm:exl3_reconstructed_bytes_total": 14,
            'vllm:exl3_kv_cache_dtype_info{dtype="auto"}': 1,
        }


def test_bytes_of_a_model_that_is_gone_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = metrics_shared.SharedMetrics()
    written = {"calls": [["linear", "native", "X", 3]], "bytes": {"trellis": 5}, "kv_cache_dtypes": []}
    written |= {"reconstructed": 8}
    shared.write(written)
    shared.write({**written, "calls": [["linear", "native", "X", 1]], "bytes": {}})  # counting began anew
    shared.write({**written, "calls": [["linear", "native", "X", 2]], "bytes": {}, "reconstructed": 9})
    assert [sample.value for metric in shared._bytes.collect() for sample in metric.samples] == [0]
    for counter, total in ((shared._calls, 4), (shared._reconstructed, 9)):
        samples = [sample for metric in counter.collect() for sample in metric.samples if "total" in sample.name]
        assert [sample.value for sample in samples] == [total]


@pytest.mark.parametrize(
    ("name", "age", "stays"),
    [
        ("vllm-exl3-{gone}-0123abcd", 100, False),
        ("vllm-exl3-{gone}-0123abcd", 5, True),  # perhaps of another container
        ("vllm-exl3-{here}-0123abcd", 100, True),
        ("vllm-exl3-{gone}-0123abcd-mine", 100, True),
        ("vllm-exl3-notes", 100, True),
        ("vllm-exl3-99999999999999999999-0123abcd", 100, True),
    ],
)
def test_what_a_killed_server_left_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, age: int, stays: bool
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv("VLLM_EXL3_METRICS_FOLDER", "")
    monkeypatch.setenv("EXL3_METRICS_FOLDER", "")
    monkeypatch.setattr(metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(metrics, "REGISTRY", CollectorRegistry())
    (folder := tmp_path / name.format(gone=gone.pid, here=os.getpid())).mkdir()
    (folder / "1.json").write_text("{}")
    for path in (folder / "1.json", folder):
        os.utime(path, (time.time() - age,) * 2)
    metrics.register_metrics()
    assert folder.exists() == stays
