"""vLLM's own n-gram embedding on a GPU: rows of an EXL3 table, on the device and in host memory, inside graphs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode, get_current_vllm_config

from tests.serving import ngram_model
from vllm_exl3.ops import backends


@pytest.fixture
def alone() -> Iterator[None]:
    with ngram_model.ranks():
        yield


def look_up(module: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.device("cuda"):
        return ngram_model.look_up(module, tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("place", "pinned"), [("resident", False), ("pinned", False), ("pinned", True), ("disk", True)]
)
def test_every_place_gives_the_specification_s_rows(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, pinned: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("VLLM_EXL3_NGRAM_TABLE", place)
    folder = ngram_model.write_pack(tmp_path / "pack")
    backends.reset_calls()
    if place == "disk":  # refused where vLLM would capture the look-up
        get_current_vllm_config().compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    with torch.device("cuda"):
        module = ngram_model.build(folder, pinned=pinned, dtype=dtype)
    found = look_up(module, ngram_model.TOKENS)
    assert found.is_cuda and found.dtype == dtype
    wanted = ngram_model.wanted(folder, ngram_model.TOKENS).to(dtype)
    assert torch.equal(found.cpu(), wanted)
    assert {backend for op, backend, _ in backends.calls() if op == "ngram"} == {"native"}


@pytest.mark.parametrize("place", ["resident", "pinned"])
def test_a_graph_looks_other_tokens_up_when_replayed(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("VLLM_EXL3_NGRAM_TABLE", place)
    folder = ngram_model.write_pack(tmp_path / "pack")
    with torch.device("cuda"):
        module = ngram_model.build(folder, dtype=torch.float16)
    layer = module.ngram_embedding
    ids = torch.zeros(64, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = layer.quant_method.embedding(layer, ids)
    ids.copy_(torch.arange(64) * 6)
    graph.replay()
    assert torch.equal(out, layer.quant_method.embedding(layer, ids))
    assert len({tuple(row) for row in out.tolist()}) == 64
