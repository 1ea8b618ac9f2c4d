"""Two GPUs: kernels on the second device of one process, engines over both, and a rank that dies."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip(f"needs two CUDA GPUs, found {torch.cuda.device_count()}", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_moe_layers import MUL1, random_layer

from vllm_exl3.cuda import linear, moe, runtime
from vllm_exl3.cuda.moe_timing import random_routing
from vllm_exl3.cuda.timing import random_weights
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards

ROOT = Path(__file__).parents[2]
ROWS = (1, 4, 16, 64, 512)
"""Between them they take the narrow kernel's identity and fp16 forms, the wide kernel and the prefill kernel."""

Tensors = tuple[torch.Tensor, ...]


def copies(shard: Shard, rows: int) -> list[Tensors]:
    """Input, trellis and scales of one linear, equal on both devices."""
    with torch.cuda.device(0):
        x = torch.randn(rows, shard.in_features, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
        first = (x.half(), *random_weights(shard, 3))
    return [tuple(part.to(f"cuda:{index}") for part in first) for index in range(2)]


def assert_same(first: torch.Tensor, second: torch.Tensor) -> None:
    """Equal bits where both GPUs lay out their multiprocessors alike, which decides how linears cut k."""
    alike = runtime.device(0).limits == runtime.device(1).limits
    tolerance = {"rtol": 0, "atol": 0} if alike else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(second.cpu(), first.cpu(), **tolerance)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("rows", ROWS)
def test_linears_of_either_device_whichever_is_the_current_one(rows: int, current: int) -> None:
    shard = Shard(8, 2, 2048, 1536, 0, 1500)
    layout = pack_shards([shard])
    both = copies(shard, rows)
    with torch.cuda.device(current):
        for _ in range(3):
            outputs = [linear.linear(*tensors, None, layout) for tensors in both]
        assert torch.cuda.current_device() == current
    assert [output.device.index for output in outputs] == [0, 1]
    assert_same(*outputs)
    expected = linear_reference(*both[0], None, tuple(layout)).double()
    for output in outputs:
        assert (output.double().to(0) - expected).norm() <= 2e-3 * expected.norm()


def test_experts_of_the_second_device() -> None:
    outputs = []
    for index in range(2):
        with torch.cuda.device(index):
            torch.manual_seed(1)
            layer = random_layer(16, 512, 384, [(3, MUL1)])
            for tokens in (1, 300):
                x, route = torch.randn(tokens, 512, device="cuda").half(), random_routing(tokens, 16, 4)
                outputs.append((index, moe.moe(x, *layer.arguments(*route)), layer.oracle(x, *route)))
    for index, output, oracle in outputs:
        assert output.device.index == index
        assert (output.double() - oracle).norm() <= 1e-3 * oracle.norm()


def test_graphs_of_both_devices_replayed_in_turn() -> None:
    shard = Shard(6, 2, 1024, 1024, 0, 1024)
    layout = pack_shards([shard])
    both = copies(shard, 4)
    eager = [linear.linear(*tensors, None, layout) for tensors in both]
    graphs, outputs = [], []
    for index, tensors in enumerate(both):
        with torch.cuda.device(index):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # without a stream, torch captures on the one that it made for the first graph, whatever device that was on
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                outputs.append(linear.linear(*tensors, None, layout))
            graphs.append(graph)
    for _ in range(20):
        for output in outputs:
            output.zero_()
        for device in range(2):
            torch.cuda.synchronize(device)
        for graph in graphs:
            graph.replay()
        for device, (output, expected) in enumerate(zip(outputs, eager, strict=True)):
            torch.cuda.synchronize(device)
            assert torch.equal(output, expected)


def test_a_thread_a_device() -> None:
    shard = Shard(8, 2, 1024, 2048, 0, 2048)
    layout = pack_shards([shard])
    both = copies(shard, 3)
    expected = [linear.linear(*tensors, None, layout) for tensors in both]

    def work(index: int) -> int:
        torch.cuda.set_device(index)
        return sum(torch.equal(linear.linear(*both[index], None, layout), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(2) as pool:  # which raises what a thread raised
        assert list(pool.map(work, range(2))) == [200, 200]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lanes",
    [
        pytest.param(["one-", "tp2-", "ep2-"], id="tensor and expert parallel, graphs, int4 caches"),
        pytest.param(["one-", "pp2", "dp2"], id="pipeline and data parallel"),
        pytest.param(["victim"], id="a killed rank"),
    ],
)
def test_engines(lanes: list[str], tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, str(ROOT / "benchmarks/gpu_two.py"), "all", "--seconds", "280"]
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "two.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    log = subprocess.run(
        [*command, *folders, "--only", *lanes], env=environment, capture_output=True, text=True, check=True, timeout=400
    ).stdout
    rows = json.loads((tmp_path / "two.json").read_text())["rows"]
    judged = [row for row in rows if "ok" in row]
    assert judged, log
    assert all(row["ok"] for row in judged), [row for row in judged if not row["ok"]]
    assert all("native" in row["kernel"] for row in judged)
    left = next(row["mib"] for row in rows if row["subject"] == "memory left")
    assert max(left) < 2048  # processes that are gone hold nothing; other programs may use the GPUs as well
