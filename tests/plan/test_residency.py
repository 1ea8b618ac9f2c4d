"""Which experts stay on the GPU: budgets, statistics and their file."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.shapes import EXPERTS, hollow
from vllm_exl3 import env, host_memory, processors
from vllm_exl3.env_variable import VariableError
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.plan.cache import request_bytes
from vllm_exl3.plan.expert_budget import planned_budget
from vllm_exl3.plan.expert_usage import add_usage, check_usage, read_usage
from vllm_exl3.plan.gpus import find_gpu
from vllm_exl3.plan.residency import LayerExperts, resident_experts
from vllm_exl3.plan.serving_plan import Wish, make_plan


def layer(key: str, *sizes: int) -> LayerExperts:
    return LayerExperts(key, dict(enumerate(sizes)))


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (0, ((), ())),
        (39, ((), ())),
        (40, ((0,), ())),
        (80, ((0,), (0,))),
        (160, ((0, 1), (0, 1))),
        (319, ((0, 1, 2, 3), (0, 1, 2))),
        (320, ((0, 1, 2, 3), (0, 1, 2, 3))),
        (1 << 60, ((0, 1, 2, 3), (0, 1, 2, 3))),
    ],
)
def test_without_statistics_layers_keep_equal_shares_of_the_lowest_numbers(budget: int, kept: tuple) -> None:
    found = resident_experts([layer("a", 40, 40, 40, 40), layer("b", 40, 40, 40, 40)], budget)
    assert found == {"a": frozenset(kept[0]), "b": frozenset(kept[1])}


def test_layers_of_different_numbers_of_experts_keep_the_same_share() -> None:
    found = resident_experts([layer("a", *[10] * 4), layer("b", *[10] * 8)], 60)
    assert found == {"a": frozenset({0, 1}), "b": frozenset({0, 1, 2, 3})}


def test_the_most_used_per_byte_stay_whichever_layer_they_are_of() -> None:
    layers = [layer("a", 10, 10, 40), layer("b", 10, 10, 10)]
    usage = {"a": [1, 7, 30], "b": [0, 8, 9]}
    assert resident_experts(layers, 30, usage) == {"a": frozenset({1}), "b": frozenset({1, 2})}
    # what is left takes the next that fits
    assert resident_experts(layers, 45, usage) == {"a": frozenset({0, 1}), "b": frozenset({1, 2})}


def test_numbers_are_those_of_the_whole_model() -> None:
    """A rank with whole experts has some of them only."""
    here = LayerExperts("a", {5: 10, 7: 10, 9: 10})
    assert resident_experts([here], 10) == {"a": frozenset({5})}
    assert resident_experts([here], 10, {"a": [99] * 5 + [1, 99, 2, 99, 3]}) == {"a": frozenset({9})}


@given(
    sizes=st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=6), min_size=1, max_size=4),
    budget=st.integers(0, 2000),
    seed=st.integers(0, 1000) | st.none(),
)
def test_budgets_are_kept_and_used(sizes: list[list[int]], budget: int, seed: int | None) -> None:
    layers = [layer(str(index), *of) for index, of in enumerate(sizes)]
    usage = None if seed is None else {part.key: [seed * (e + 3) % 17 for e in part.nbytes] for part in layers}
    found = resident_experts(layers, budget, usage)
    kept = sum(part.nbytes[expert] for part in layers for expert in found[part.key])
    left_out = [n for part in layers for expert, n in part.nbytes.items() if expert not in found[part.key]]
    assert kept <= budget
    assert all(size > budget - kept for size in left_out)


def test_counts_are_added_up_over_servers(tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    assert read_usage(file) is None
    add_usage(file, {"b": [1, 2], "a": [3, 0]})
    add_usage(file, {"a": [1, 1], "c": [7]})
    assert read_usage(file) == {"a": [4, 1], "b": [1, 2], "c": [7]}
    check_usage(file, read_usage(file), {"a": 2, "c": 1})


def _add_often(file: Path) -> None:
    for _ in range(50):
        add_usage(file, {"a": [1, 2]})


def test_processes_add_at_the_same_time(tmp_path: Path) -> None:
    file, context = tmp_path / "usage.json", multiprocessing.get_context("fork")
    processes = [context.Process(target=_add_often, args=(file,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert read_usage(file) == {"a": [150, 300]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "vllm-exl3 expert usage", "version": 2, "layers": {}}',
        '{"format": "vllm-exl3 expert usage", "version": 1, "layers": {"a": [1, -1]}}',
        '{"format": "vllm-exl3 expert usage", "version": 1, "layers": {"a": [true]}}',
        '{"format": "vllm-exl3 expert usage", "version": 1, "layers": {"a": 3}}',
        "[" * 100000,
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "usage.json"
    file.write_text(content)
    with pytest.raises(Exl3PackError, match="EXPERTS_STATS"):
        read_usage(file)
    with pytest.raises(Exl3PackError, match="EXPERTS_STATS"):
        add_usage(file, {"a": [1]})
    assert file.read_text() == content


@pytest.mark.parametrize(("experts", "found"), [({"b": 2}, "no layer b"), ({"a": 3}, "2 experts in a, where")])
def test_statistics_of_another_model_are_refused(tmp_path: Path, experts: dict[str, int], found: str) -> None:
    with pytest.raises(Exl3PackError, match=found):
        check_usage(tmp_path / "usage.json", {"a": [1, 2]}, experts)


def test_other_numbers_of_experts_are_not_added_up(tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    add_usage(file, {"a": [1, 2]})
    with pytest.raises(Exl3PackError, match="2 experts in a, where the model has 3"):
        add_usage(file, {"a": [1, 2, 3]})
    assert json.loads(file.read_text())["layers"] == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [("GPU_GIB", "auto", None), ("GPU_GIB", "0", 0), ("GPU_GIB", "1.5", 3 << 29), ("GPU_GIB", "65536", 1 << 46)],
)
def test_settings(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: object) -> None:
    monkeypatch.setenv(f"VLLM_EXL3_EXPERTS_{variable}", text)
    assert getattr(env, f"EXPERTS_{variable}").get() == value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"EXPERTS": "disk"}, "expected one of gpu, host"),
        ({"EXPERTS": "host", "EXPERTS_GPU_GIB": "-1"}, "from 0 to 65536"),
        ({"EXPERTS": "host", "EXPERTS_GPU_GIB": "65537"}, "from 0 to 65536"),
        ({"EXPERTS": "host", "EXPERTS_GPU_GIB": "nan"}, "from 0 to 65536"),
        ({"EXPERTS": "host", "EXPERTS_GPU_GIB": "8GiB"}, "from 0 to 65536"),
        ({"EXPERTS_GPU_GIB": "8"}, "EXPERTS=gpu keeps in GPU memory whole"),
        ({"EXPERTS": "gpu", "EXPERTS_GPU_GIB": "0"}, "EXPERTS=gpu keeps in GPU memory whole"),
        ({"EXPERTS_STATS": "/"}, "a file in a folder that exists"),
        ({"EXPERTS_STATS": "/no such folder/usage.json"}, "a file in a folder that exists"),
    ],
)
def test_impossible_settings(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str) -> None:
    for name, text in settings.items():
        monkeypatch.setenv(f"VLLM_EXL3_{name}", text)
    with pytest.raises(VariableError, match=message):
        env.validate()


def test_the_tightest_limit_of_host_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    outer, inner, old = tmp_path / "outer", tmp_path / "inner", tmp_path / "old"
    for folder in (outer, inner, old):
        folder.mkdir()
    (outer / "memory.max").write_text("max\n")
    (inner / "memory.max").write_text("4096000\n")
    (inner / "memory.current").write_text("2000000\n")
    (inner / "memory.stat").write_text("anon 5\nfile 500000\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(processors, "cgroup_folders", lambda controller: [outer, inner])
    assert host_memory.available() == 4096000 - 2000000 + 500000
    (old / "memory.limit_in_bytes").write_text("1000000\n")
    (old / "memory.usage_in_bytes").write_text("3000000\n")
    (old / "memory.stat").write_text("total_cache 100\n")
    monkeypatch.setattr(processors, "cgroup_folders", lambda controller: [inner, old])
    assert host_memory.available() == 0
    monkeypatch.setattr(processors, "cgroup_folders", lambda controller: [])
    assert host_memory.available() == 5000 << 10
    meminfo.unlink()
    assert host_memory.available() is None


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return hollow(tmp_path_factory.mktemp("experts") / "pack", **EXPERTS)


def planned(pack: Pack, **changes: Any) -> int:
    options = {"memory": 8 << 30, "length": 4096, "chunk": 2048, "seqs": 256, "cache_type": "auto"}
    rest = {"cache_bytes": None, "ranks": 1, "scales": 0, "layers": range(4), "stages": 1, "where": "layer"}
    return planned_budget(pack, **{**options, **rest, **changes})


def test_a_plan_leaves_experts_what_nothing_else_needs(pack: Pack) -> None:
    """What `vllm-exl3 plan` counts, term by term."""
    wish = Wish(find_gpu("RTX 4090"), (8 << 30,), length=4096, seqs=256, utilization=1.0)
    rank = make_plan(pack, wish).ranks[0]
    needed = request_bytes(rank.kinds, "auto", 4096, ranks=1, chunk=2048)
    room = rank.budget - sum(rank.workspace.values()) - needed
    assert planned(pack) == room - (rank.weights.total - rank.weights.experts)
    assert planned(pack, scales=1000) == planned(pack) - 1000
    assert planned(pack, cache_bytes=needed + 5) == planned(pack) - 5
    assert planned(pack, memory=9 << 30) == planned(pack) + (1 << 30)


def test_a_pipeline_stage_has_its_layers_only(pack: Pack) -> None:
    stages = [planned(pack, layers=range(2 * n, 2 * n + 2), stages=2, cache_bytes=0) for n in range(2)]
    assert min(stages) > planned(pack, cache_bytes=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": 1 << 30}, r"1.00 GiB of GPU memory.*even without routed experts.*Lower --max-model-len"),
        ({"length": 1 << 22}, r"of KV cache\. Lower --max-model-len"),
        ({"cache_type": "fp8_ds_mla"}, r"--kv-cache-dtype fp8_ds_mla.*--kv-cache-memory-bytes"),
    ],
)
def test_what_leaves_nothing_or_is_not_known_is_refused(pack: Pack, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exl3PackError, match=message):
        planned(pack, **changes)
