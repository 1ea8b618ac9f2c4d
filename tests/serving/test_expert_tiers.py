"""Routed experts divided over GPU and host memory: which, where their words are, and what is refused."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.moe_layers import random_layer, random_routing
from tests.serving.by_address import GPU_BYTES, moe_by_address, pretend_gpu, words_at
from tests.serving.conftest import PACKS, golden_logits, relative_error
from tests.serving.engine import engine, logits_of, model_of
from tests.serving.moe_module import MIXED, MLP, build, inputs, load, open_pack, run, stored
from vllm_exl3 import host_memory, runtime_diagnostics
from vllm_exl3.ops import backends
from vllm_exl3.ops.pinned import PinnedWords
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.plan.expert_usage import add_usage
from vllm_exl3.serving import expert_tiers
from vllm_exl3.serving.expert_tiers import ExpertTiers, Share
from vllm_exl3.serving.moe_layout import STAND_IN_WORDS

QWEN = "qwen3_moe-3.0-mul1"


def serve_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends.Backend("moe", "cpu", "by_address", moe_by_address, lambda: None)
    monkeypatch.setitem(backends._choices, ("moe", "cpu"), backends.Choice(backend))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rank", "ranks", "here", "resident"),
    [
        (0, 1, None, {0, 2}),
        (0, 1, None, set()),
        (1, 2, None, {1}),
        (0, 1, [1, 3], {3}),
    ],
)
def test_results_do_not_depend_on_where_experts_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    ranks: int,
    here: list[int] | None,
    resident: set[int],
    bias: bool,
) -> None:
    serve_by_address(monkeypatch)
    layer = random_layer(4, 256, 384, MIXED, bias=bias)
    tensors = stored(layer, padded_bias=bias)
    pack = open_pack(tmp_path, tensors)
    x, (weights, ids) = inputs(9, 256), random_routing(9, 4, 2)
    outputs, modules = [], []
    for kept in (None, frozenset(resident)):
        module = build(pack, layer, rank=rank, ranks=ranks, here=here, resident=kept)
        load(module, tensors)
        outputs.append(run(module, x, weights, ids))
        modules.append(module)
    assert torch.equal(*outputs)
    whole, divided = modules
    host = divided.quant_method.host
    local = list(range(4)) if here is None else here
    assert divided.quant_method.layout.in_host == tuple(i for i, e in enumerate(local) if e not in resident)
    left = sum(getattr(divided, f"{name}_trellis").numel() for name in ("w13", "w2"))
    stand_ins = 3 * STAND_IN_WORDS * len(divided.quant_method.layout.in_host)
    total = sum(getattr(whole, f"{name}_trellis").nbytes for name in ("w13", "w2"))
    assert host.nbytes + 2 * (left - stand_ins) == total
    assert divided.quant_method.bytes_beside_parameters() == {"trellis in host memory": host.nbytes}


def test_every_word_is_where_the_table_says(tmp_path: Path) -> None:
    layer = random_layer(3, 256, 256, MIXED)
    module = build(open_pack(tmp_path, stored(layer)), layer, resident=frozenset({1}))
    load(module, stored(layer))
    method = module.quant_method
    table = method._table(module, torch.device("cpu"))
    bases = [module.w13_trellis.data_ptr(), module.w13_trellis.data_ptr(), module.w2_trellis.data_ptr()]
    host = {name: (words.data_ptr(), words.data_ptr() + words.nbytes) for name, words in method.host.words.items()}
    for expert, parts in enumerate(layer.projections):
        for index, part in enumerate(parts):
            name = "w2" if index == 2 else "w13"
            address = bases[index] + 2 * int(table[expert, index, 0])
            assert address % 16 == 0
            assert (host[name][0] <= address < host[name][1]) == (expert != 1)
            expected = layer.tensors[f"{name}_trellis"][part.trellis : part.trellis + part.trellis_words]
            assert torch.equal(words_at(address, part.trellis_words), expected)


def test_parameters_that_move_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_address(monkeypatch)
    layer = random_layer(2, 128, 128)
    module = build(open_pack(tmp_path, stored(layer)), layer, resident=frozenset({0}))
    load(module, stored(layer))
    route = random_routing(2, 2, 1)
    run(module, inputs(2, 128), *route)
    module.w2_trellis.data = module.w2_trellis.data.clone()
    with pytest.raises(RuntimeError, match=r"parameters that have moved.*VLLM_EXL3_EXPERTS=gpu"):
        run(module, inputs(2, 128), *route)


def test_host_memory_is_of_the_exact_size_and_goes_with_the_layer(tmp_path: Path) -> None:
    layer = random_layer(2, 128, 128)
    module = build(open_pack(tmp_path, stored(layer)), layer, resident=frozenset())
    words = module.quant_method.host.words
    assert {name: len(part) for name, part in words.items()} == {
        name: len(layer.tensors[f"{name}_trellis"]) for name in ("w13", "w2")
    }
    kept = weakref.ref(module.quant_method.host)
    del module, words
    gc.collect()
    assert kept() is None


class FakeRuntime:
    def __init__(self, status: int) -> None:
        self.status, self.registered = status, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append((address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.registered = [entry for entry in self.registered if entry[0] != address]


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_pinned_and_let_go_or_refused(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    runtime = FakeRuntime(status)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    if status:
        with pytest.raises(Exl3PackError, match=r"no 6.8 KiB of host memory.*as much for some experts.*Do that"):
            PinnedWords(3500, "some experts", "Do that.")
        return
    memory = PinnedWords(3500, "some experts", "Do that.")
    assert runtime.registered == [(memory.words.data_ptr(), 7000, 3)]
    del memory
    gc.collect()
    assert not runtime.registered


def test_more_memory_than_there_is_address_space_is_refused() -> None:
    with pytest.raises(Exl3PackError, match=r"that could be pinned.*Do that"):
        PinnedWords(1 << 60, "some experts", "Do that.")


class Decision:
    """One process' decision for a pack of one layer of eight experts, each of the same size."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = random_layer(8, 256, 128)
        self.pack: Pack = open_pack(folder, stored(layer))
        self.total = 2 * sum(len(layer.tensors[f"{name}_trellis"]) for name in ("w13", "w2"))
        self.group = self.pack.experts[MLP]
        self.current = SimpleNamespace(
            offload_config=SimpleNamespace(
                uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
            ),
            load_config=SimpleNamespace(load_format="auto"),
            parallel_config=SimpleNamespace(local_world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1),
        )
        stages = SimpleNamespace(reason=lambda key: None, layers=range(1))
        monkeypatch.setattr(expert_tiers, "OtherStages", lambda pack: stages)
        monkeypatch.setattr(expert_tiers, "get_current_vllm_config_or_none", lambda: self.current)
        self.planned = 0
        monkeypatch.setattr(expert_tiers, "_planned", lambda *_: self.planned)

    def __call__(self, local: tuple[int, ...] = tuple(range(8)), rank: int = 0, ranks: int = 1) -> ExpertTiers:
        tiers = ExpertTiers(SimpleNamespace(pack=self.pack))
        self.resident = tiers.resident("layers.0.experts", self.group, Share(local, rank, ranks))
        return tiers


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decision:
    pretend_gpu(monkeypatch)
    return Decision(tmp_path, monkeypatch)


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.9f}"


def test_all_stay_where_nothing_is_said(decide: Decision) -> None:
    placement = decide().placement
    assert decide.resident is None and placement.tier == "gpu" and placement.host_bytes == 0


@pytest.mark.parametrize(("share", "kept"), [(0, 0), (0.3, 2), (0.5, 4), (0.99, 7)])
def test_a_budget_is_kept(decide: Decision, monkeypatch: pytest.MonkeyPatch, share: float, kept: int) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", gib(share * decide.total + 8))
    placement = decide().placement
    assert decide.resident == frozenset(range(kept)) and placement.tier == "host"
    assert placement.gpu_bytes == kept * decide.total // 8
    assert placement.gpu_bytes + placement.host_bytes == decide.total


def test_host_without_a_budget_keeps_none(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    assert decide().placement.budget.endswith("none set") and decide.resident == frozenset()


def test_a_budget_that_holds_all_leaves_nothing_in_host_memory(
    decide: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", gib(decide.total + 8))
    placement = decide().placement
    assert decide.resident is None and placement.tier == "gpu" and "which holds all" in placement.budget


@pytest.mark.parametrize(("planned", "limit", "kept"), [(0.5, None, 4), (0.5, 0.25, 2), (0.25, 0.5, 2), (2, None, 8)])
def test_auto_keeps_what_is_planned_and_no_more_than_the_budget(
    decide: Decision, monkeypatch: pytest.MonkeyPatch, planned: float, limit: float | None, kept: int
) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "auto")
    if limit is not None:
        monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", gib(limit * decide.total + 8))
    decide.planned = int(planned * decide.total)
    decide()
    assert decide.resident == (None if kept == 8 else frozenset(range(kept)))


def test_auto_is_all_where_models_run_on_the_cpu(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "auto")
    monkeypatch.setattr(expert_tiers, "current_platform", SimpleNamespace(device_type="cpu"))
    assert decide().placement.tier == "gpu" and decide.resident is None


def test_the_most_used_stay(decide: Decision, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", gib(decide.total / 4 + 8))
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_STATS", str(file))
    assert decide().placement.chosen_by.startswith("lowest numbers")
    add_usage(file, {MLP: [0, 0, 5, 0, 0, 9, 0, 1]})
    assert str(file) in decide().placement.chosen_by and decide.resident == frozenset({2, 5})
    decide(local=(3, 7, 4), rank=0, ranks=1)
    assert decide.resident == frozenset({7, 3})
    file.unlink()
    add_usage(file, {MLP: [1, 2]})
    with pytest.raises(Exl3PackError, match=r"2 experts in model\.layers\.0\.mlp, where the pack has 8"):
        decide()


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_than_the_host_has_is_refused_before_anything_is_read(
    decide: Decision, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    decide.current.parallel_config.local_world_size = ranks
    monkeypatch.setattr(host_memory, "available", lambda: ranks * decide.total - 1)
    with pytest.raises(Exl3PackError, match=r"of host memory available; expected .* outside of GPU memory"):
        decide()
    monkeypatch.setattr(host_memory, "available", lambda: ranks * decide.total)
    decide()


def test_a_budget_beyond_the_gpu_is_refused(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", gib(GPU_BYTES + 100))
    with pytest.raises(Exl3PackError, match=r"16.00 GiB on a GPU with 16.00 GiB"):
        decide()


def _uva(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    decide.current.offload_config.uva.cpu_offload_gb = 4


def _prefetch(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    decide.current.offload_config.prefetch.offload_group_size = 8


def _sharded(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    decide.current.load_config.load_format = "sharded_state"


def _guard(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_REQUIRE_UVA_EXPERTS", "1")


def _reference(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, "reference")


def _cpu(decide: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_tiers, "current_platform", SimpleNamespace(device_type="cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_uva, r"vLLM's own offloading.*Leave vLLM's options out"),
        (_prefetch, r"vLLM's own offloading.*Leave vLLM's options out"),
        (_sharded, r"--load-format sharded_state.*--load-format auto"),
        (_guard, r"VLLM_EXL3_REQUIRE_UVA_EXPERTS=1.*Unset"),
        (_reference, r"with reference kernels.*VLLM_EXL3_MOE_KERNEL=native"),
        (_cpu, r"on cpu.*Unset VLLM_EXL3_EXPERTS"),
    ],
)
def test_what_does_not_go_together_is_refused(
    decide: Decision, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], message: str
) -> None:
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    change(decide, monkeypatch)
    with pytest.raises(Exl3PackError, match=message):
        decide()
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "gpu")
    decide()


def test_planned_sizes_are_the_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven shares, mixed rates: bytes in the report are those that are taken."""
    layer = random_layer(4, 256, 640, MIXED)
    pack = open_pack(tmp_path, stored(layer))
    for rank, ranks, here in ((0, 2, None), (3, 4, None), (0, 1, [1, 2])):
        local = tuple(range(4)) if here is None else tuple(here)
        sizes = expert_tiers.expert_bytes(pack.experts[MLP], pack.linears, local, rank, ranks)
        module = build(pack, layer, rank=rank, ranks=ranks, here=here)
        assert sizes.total == module.w13_trellis.nbytes + module.w2_trellis.nbytes
        scales = (getattr(module, f"{name}_{leaf}") for name in ("w13", "w2") for leaf in ("suh", "svh"))
        assert sizes.scales == sum(part.nbytes for part in scales)


def test_loading_counts_as_vllms_reload_does(tmp_path: Path) -> None:
    """vLLM counts what loaders copy into parameters on the meta device, to know when a layer is complete."""
    layer = random_layer(3, 128, 128, MIXED)
    tensors = stored(layer)
    module = build(open_pack(tmp_path, tensors), layer, resident=frozenset({1}))
    load(module, tensors)
    before = {name: words.clone() for name, words in module.quant_method.host.words.items()}
    counted: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                counted.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    for name, param in list(module.named_parameters()):
        meta = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)
        meta.weight_loader = param.weight_loader
        setattr(module, name, meta)
    with Count():
        for name, (_, values) in tensors.items():
            loaded = torch.from_numpy(values.copy())
            loaded = loaded + 1 if name.endswith("trellis") else loaded
            list(module.load_weights([(name.removeprefix(f"{MLP}.experts."), loaded)]))
    assert sum(counted) == sum(param.numel() for param in module.parameters())
    assert all(torch.equal(before[name], words) for name, words in module.quant_method.host.words.items())


def test_an_engine_serves_reloads_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the experts in host memory; level 2 of sleep loses the parameters, and reloading restores all."""
    pretend_gpu(monkeypatch)
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "auto")  # with the limit below
    pack = Pack.open(PACKS / QWEN)
    trellises = {key: linear.trellis.nbytes for key, linear in pack.linears.items() if ".experts." in key}
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", gib(sum(trellises.values()) / 2 + 8))
    ids, logits = golden_logits(QWEN)
    with engine(PACKS / QWEN) as llm:
        before = logits_of(llm, ids)
        assert relative_error(before[:40], logits[:40]) < 1e-3  # behind it, routing has a near tie
        for parameter in model_of(llm).parameters():
            parameter.data.view(torch.uint8).fill_(0xFE)
        methods = [getattr(module, "quant_method", None) for module in model_of(llm).modules()]
        for method in methods:
            for words in method.host.words.values() if getattr(method, "host", None) else ():
                words.fill_(0x7E7E)
        llm.collective_rpc("reload_weights")
        torch.testing.assert_close(logits_of(llm, ids), before, rtol=0, atol=0)
        model = runtime_diagnostics()["models"][-1]
        text = expert_tiers_line()
    half = sum(trellises.values()) // 2
    assert model["tiers"]["host_bytes"] == model["bytes"]["trellis in host memory"] == half
    assert model["tiers"]["resident_experts"] == [4, 4]
    assert "4 experts in each layer (lowest numbers" in text and "read by the GPU over the bus" in text


def expert_tiers_line() -> str:
    from vllm_exl3.serving.report import reports

    return next(line for line in reports()[-1].text().splitlines() if line.startswith("  tiers "))
