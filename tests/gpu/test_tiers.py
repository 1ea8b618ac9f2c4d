"""Routed experts in host memory on a GPU: the op's bits, graphs, and whole engines. Engines need vLLM for CUDA."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_moe_layers import INST3, MCG, MUL1, GpuLayer, random_layer

from vllm_exl3.cuda import moe
from vllm_exl3.cuda.moe_timing import random_routing
from vllm_exl3.cuda.share import CpuShare, SideStream
from vllm_exl3.ops.experts import shift_trellises
from vllm_exl3.ops.moe import MoECall
from vllm_exl3.ops.pinned import PinnedWords

MIXED = [(2, MUL1), (4, MUL1), (3, MCG), (6, INST3), (2.5, MUL1)]


def to_host(layer: GpuLayer, experts: list[int]) -> list[PinnedWords]:
    """Move trellises of these experts to host memory; what was theirs on the GPU is overwritten."""
    memory, shifts = [], []
    for name, projections in (("w13", slice(0, -1)), ("w2", slice(-1, None))):
        words = layer.tensors[f"{name}_trellis"]
        pinned = PinnedWords(len(words), "experts", "Run this on a machine with more memory.")
        pinned.words.copy_(words)
        memory.append(pinned)
        for expert in experts:
            for part in layer.projections[expert][projections]:
                words[part.trellis : part.trellis + part.trellis_words] = 0x1234
        shifts.append((pinned.device_address - words.data_ptr()) // 2)
    layer.table.copy_(shift_trellises(layer.table.cpu(), experts, *shifts))
    return memory


@pytest.mark.parametrize("kinds", [[(4, MUL1)], MIXED], ids=["K4", "mixed"])
@pytest.mark.parametrize("experts", [[1, 3, 6], list(range(8))], ids=["some", "all"])
def test_bits_do_not_depend_on_where_trellises_are(kinds: list[Any], experts: list[int]) -> None:
    layer = random_layer(8, 1024, 512, kinds)
    cases = []
    for tokens in (1, 2, 8, 33, 300, 2000):
        x, route = torch.randn(tokens, 1024, device="cuda").half(), random_routing(tokens, 8, 2)
        cases.append((x, route, moe.moe(x, *layer.arguments(*route))))
    memory = to_host(layer, experts)
    for x, route, expected in cases:
        assert torch.equal(moe.moe(x, *layer.arguments(*route)), expected), len(x)
    assert memory


def test_a_graph_reads_host_memory() -> None:
    layer = random_layer(8, 1024, 512, [(4, MUL1)])
    x, route = torch.randn(4, 1024, device="cuda").half(), random_routing(4, 8, 2)
    expected = moe.moe(x, *layer.arguments(*route))
    memory = to_host(layer, [0, 2, 4, 6])
    moe.moe(x, *layer.arguments(*route))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.moe(x, *layer.arguments(*route))
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    # what lies there when it is replayed counts, not what lay there when it was captured
    memory[0].words.zero_()
    graph.replay()
    assert not torch.equal(out, expected)


@pytest.mark.parametrize("kinds", [[(4, MUL1)], MIXED], ids=["K4", "mixed"])
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_the_cpu_computes_its_share(kinds: list[Any], tokens: int) -> None:
    """Eagerly and in a graph that is replayed with other inputs; against the GPU alone."""
    layer, experts = random_layer(8, 1024, 512, kinds), [1, 3, 6]
    arguments = layer.arguments(*random_routing(1, 8, 2, device="cpu"))
    on_cpu = [part.cpu() if isinstance(part, torch.Tensor) else part for part in arguments]
    call = MoECall(*on_cpu)._replace(table=layer.table.cpu()[experts].contiguous())
    local, own = torch.full((2, 8), -1, dtype=torch.int32)
    local[experts] = torch.arange(3, dtype=torch.int32)
    rest = [expert for expert in range(8) if expert not in experts]
    own[rest] = torch.tensor(rest, dtype=torch.int32)
    share, own = CpuShare(SideStream(4, None, 64, 1024, 2), call, local), own.cuda()
    x, (weights, ids) = torch.randn(tokens, 1024, device="cuda").half(), random_routing(tokens, 8, 2)

    def divided() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        reply = share.enqueue(x, weights, ids, stream)
        gpu = moe.moe(x, *layer.arguments(weights, ids, own), out_dtype=torch.float32)
        share.join(stream)
        return gpu + reply

    def error(found: torch.Tensor) -> float:
        wanted = moe.moe(x, *layer.arguments(weights, ids), out_dtype=torch.float32)
        return float((found - wanted).norm() / wanted.norm())

    for _ in range(20):
        assert error(divided()) < 2e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = divided()
    runs = share.runs
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        ids.copy_(torch.randn(tokens, 8, device="cuda").topk(2).indices)
        graph.replay()
        assert error(out) < 2e-3
    torch.cuda.synchronize()
    assert share.runs == runs + 20


vllm = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True, check=False).returncode != 0,
    reason="needs vLLM for CUDA",
)


def _budget(monkeypatch: pytest.MonkeyPatch, share: float) -> int:
    """Let this share of the pack's experts stay; returns bytes of all of them."""
    from tests.gpu.engines import MOE
    from vllm_exl3.pack import Pack

    pack = Pack.open(MOE)
    total = sum(linear.trellis.nbytes for key, linear in pack.linears.items() if ".experts." in key)
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "host")
    monkeypatch.setenv("VLLM_EXL3_EXPERTS_GPU_GIB", f"{(share * total + 8) / 2**30:.9f}")
    return total


@vllm
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_engines_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch, share: float, eager: bool) -> None:
    from tests.gpu.engines import MOE, plain_tokens, serving, tokens
    from tests.serving.engine import PROMPTS, generate
    from vllm_exl3 import runtime_diagnostics

    expected = plain_tokens(MOE) if eager else tokens(MOE, enforce_eager=False)
    total = _budget(monkeypatch, share)
    with serving(MOE, enforce_eager=eager) as llm:
        assert generate(llm, PROMPTS) == expected
    model = runtime_diagnostics()["models"][-1]
    assert model["bytes"]["trellis in host memory"] == model["tiers"]["host_bytes"] == (1 - share) * total
    assert model["tiers"]["gpu_bytes"] == share * total


@vllm
@pytest.mark.parametrize("eager", [True, False])
def test_an_engine_with_experts_on_the_cpu(monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    """Sums are of other arithmetic, so the first tokens are compared, and that replays repeat themselves."""
    from tests.gpu.engines import MOE, plain_tokens, serving
    from tests.serving.engine import PROMPTS, generate
    from vllm_exl3.ops import backends

    expected = plain_tokens(MOE)
    _budget(monkeypatch, 0.5)
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "cpu")
    backends.reset_calls()
    with serving(MOE, enforce_eager=eager) as llm:
        found = [generate(llm, PROMPTS) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert [row[:2] for row in found[0]] == [row[:2] for row in expected]
    assert backends.calls()["moe", "cpu_share", "RoutedExperts"]


@vllm
@pytest.mark.parametrize("mode", ["eager", pytest.param("graphs", marks=pytest.mark.slow)])
def test_sleeping_and_reloading(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    from tests.gpu.engines import MOE

    _budget(monkeypatch, 0.5)
    command = [sys.executable, "-m", "tests.gpu.sleeping", str(MOE), mode]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


@vllm
def test_auto_keeps_all_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu.engines import MOE, plain_tokens, tokens
    from vllm_exl3 import runtime_diagnostics

    expected = plain_tokens(MOE)
    monkeypatch.setenv("VLLM_EXL3_EXPERTS", "auto")
    assert tokens(MOE) == expected
    tiers = runtime_diagnostics()["models"][-1]["tiers"]
    assert tiers["tier"] == "gpu" and "which holds all" in tiers["budget"]
