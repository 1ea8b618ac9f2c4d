"""Speculative decoding changes speed, never tokens: n-grams, draft models of either kind, a pack's own draft layer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.compilation.backends import split_graph
from vllm.config import CompilationConfig

from tests.serving.conftest import PACKS
from tests.serving.dense_twin import write_dense_twin
from tests.serving.engine import PROMPTS, engine, generate, model_of
from tests.serving.mtp_pack import write_mtp_pack
from tests.serving.sampling import lend_kernels
from vllm_exl3 import runtime_diagnostics

pytestmark = pytest.mark.slow

ODD, TIED = PACKS / "llama_odd-4.0-mul1", PACKS / "llama_tied-2.0-mcg"
TOKENS = 24
MTP = {"disable_log_stats": False, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}

lend_kernels()


def plain(pack: Path) -> list[list[int]]:
    with engine(pack) as llm:
        return generate(llm, PROMPTS, TOKENS)


def acceptance(llm: LLM) -> float:
    """Accepted draft tokens over proposed ones."""
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    proposed = counters["vllm:spec_decode_num_draft_tokens"]
    assert proposed
    return counters["vllm:spec_decode_num_accepted_tokens"] / proposed


def speculating(draft: Path | str, method: str = "draft_model") -> dict[str, Any]:
    return {
        "disable_log_stats": False,
        "speculative_config": {"model": str(draft), "method": method, "num_speculative_tokens": 3},
    }


def test_a_pack_accepts_what_it_drafts_itself() -> None:
    expected = plain(ODD)
    with engine(ODD, **speculating(ODD)) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
        assert acceptance(llm) > 0.95


@pytest.mark.parametrize("exl3_is_the", ["target", "draft"])
def test_a_pack_beside_its_dense_twin(exl3_is_the: str, tmp_path: Path) -> None:
    """Each model is served by its own files: neither inherits the other's quantization."""
    twin = write_dense_twin(ODD, tmp_path / "dense")
    target, draft = (ODD, twin) if exl3_is_the == "target" else (twin, ODD)
    expected = plain(target)
    with engine(target, **speculating(draft)) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
        assert acceptance(llm) > 0.8
        assert any(hasattr(layer, "trellis") for layer in model_of(llm).modules()) == (exl3_is_the == "target")
    assert runtime_diagnostics()["models"][-1]["pack"] == str(ODD)


def test_a_draft_of_other_bits_changes_no_token() -> None:
    """Two packs at once, with different codebooks; acceptance may be anything."""
    expected = plain(TIED)
    with engine(TIED, **speculating(ODD)) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected


NGRAM = """
import sys
from tests.serving.engine import PROMPTS, engine, generate
from tests.serving.sampling import lend_kernels
lend_kernels()
found = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
with engine(sys.argv[1], speculative_config=found) as llm:
    print("TOKENS", generate(llm, PROMPTS, 24), flush=True)
"""


def test_ngrams_change_no_token() -> None:
    """In its own process: after vLLM has imported numba for it, no further engine starts in the same one."""
    command = [sys.executable, "-c", NGRAM, str(ODD)]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("TOKENS")] or [found.stderr[-2000:]]
    assert json.loads(line.removeprefix("TOKENS")) == plain(ODD)


@pytest.mark.parametrize(("draft", "method"), [("exl3", "Exl3LinearMethod"), ("dense", "UnquantizedLinearMethod")])
def test_a_draft_layer_is_served_as_it_is_stored(draft: str, method: str, tmp_path: Path) -> None:
    pack = write_mtp_pack(tmp_path / draft, draft)
    expected = plain(pack)
    with engine(pack, **MTP) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
        methods = draft_methods(llm)
    assert {methods[name] for name in methods if name.startswith("model.layers.0")} == {method}
    assert methods["model.fc"] == method


def test_each_module_of_a_draft_layer_is_decided_by_itself(tmp_path: Path) -> None:
    pack = write_mtp_pack(tmp_path / "mixed", "mixed")
    expected = plain(pack)
    with engine(pack, **MTP) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
        methods = draft_methods(llm)
    assert methods["model.layers.0.self_attn.qkv_proj"] == "Exl3LinearMethod"
    assert methods["model.layers.0.mlp.down_proj"] == "UnquantizedLinearMethod"


def test_a_draft_layer_that_foresees_is_believed(tmp_path: Path) -> None:
    """Tokens that it proposes are taken, also in steps that take some of one request's and none of another's."""
    pack = write_mtp_pack(tmp_path / "foreseeing", "foreseeing")
    expected = plain(pack)
    with engine(pack, **MTP) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
        assert acceptance(llm) > 0.9


@pytest.mark.parametrize("draft", ["exl3", "foreseeing"])
def test_a_draft_layer_is_one_graph_that_only_attention_cuts(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs are captured of the pieces: target and draft are traced whole, and each product is in a piece."""
    pack = write_mtp_pack(tmp_path / draft, draft)
    expected = plain(pack)
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    monkeypatch.setattr(CompilationConfig, "init_backend", lambda *_, **__: record)
    with engine(pack, enforce_eager=False, **MTP) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
    first = {"exl3": 2, "foreseeing": 1}[draft]  # the projection of the draft's input is one, or is in 16 bits
    assert [products_between_cuts(graph) for graph in graphs] == [[1, 4, 3], [first, 3]]


def products_between_cuts(graph: torch.fx.GraphModule) -> list[int]:
    """EXL3 products in each piece that vLLM makes of a traced model: the layers' attention lies between the pieces."""
    _, pieces = split_graph(graph, list(CompilationConfig._attention_ops))
    return [
        sum("vllm_exl3.linear" in str(node.target) for node in piece.graph.graph.nodes)
        for piece in pieces
        if not piece.is_splitting_graph
    ]


def test_a_draft_layer_that_is_not_stored_is_refused(tmp_path: Path) -> None:
    pack = write_mtp_pack(tmp_path / "absent", "absent")
    assert plain(pack)
    with (
        pytest.raises(Exception, match=r"layers\.0\.self_attn|not initialized|mtp"),
        engine(pack, **MTP),
    ):
        pass


def draft_methods(llm: LLM) -> dict[str, str]:
    """The class of each linear's method in the draft model."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    methods = {name: getattr(module, "quant_method", None) for name, module in runner.drafter.model.named_modules()}
    return {name: type(method).__name__ for name, method in methods.items() if "Linear" in type(method).__name__}
