"""Whole engines on a GPU: host memory, sleeping, adapters, drafts, loaders, two at once. Needs vLLM for CUDA."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.offloader import get_offloader

from tests.gpu.engines import DENSE, MOE, ROW_CODED, plain_tokens, serving, tokens
from tests.serving.dense_twin import write_dense_twin
from tests.serving.engine import PROMPTS, generate, model_of
from tests.serving.mtp_pack import write_mtp_pack
from tests.serving.test_lora import EVERY_LAYER, PROMPT, adapter, with_adapters
from tests.serving.test_speculation import MTP, acceptance
from vllm_exl3 import runtime_diagnostics
from vllm_exl3.serving.offload import PARAMETERS, in_host_memory, inspect_exl3_moe_uva_layer

EXPERTS = {"offload_backend": "uva", "cpu_offload_gb": 1, "cpu_offload_params": set(PARAMETERS)}
PREFETCH = {
    "offload_backend": "prefetch",
    "offload_group_size": 2,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
}
WHOLE_STEPS = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
}


@pytest.mark.parametrize("eager", [True, False])
def test_experts_in_mapped_host_memory(monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    expected = plain_tokens(MOE)
    monkeypatch.setenv("VLLM_EXL3_REQUIRE_UVA_EXPERTS", "1")
    with serving(MOE, enforce_eager=eager, **EXPERTS) as llm:
        assert generate(llm, PROMPTS) == expected
        layers = [layer for layer in model_of(llm).modules() if hasattr(layer, "w13_trellis")]
        assert layers and all(inspect_exl3_moe_uva_layer(layer).fully_uva_offloaded for layer in layers)
        nbytes = sum(getattr(layer, name).nbytes for layer in layers for name in PARAMETERS if "trellis" in name)
    assert runtime_diagnostics()["models"][-1]["bytes"]["trellis in host memory"] == nbytes


@pytest.mark.parametrize("options", [{}, EXPERTS])
def test_experts_that_are_not_mapped_are_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setenv("VLLM_EXL3_REQUIRE_UVA_EXPERTS", "1")
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    with pytest.raises(RuntimeError, match="ordinary CPU tensors" if options else "none of its payloads"):
        tokens(MOE, **options)


@pytest.mark.parametrize("pack", [DENSE, MOE])
def test_layers_that_are_fetched_ahead(pack: Path) -> None:
    expected = plain_tokens(pack)
    with serving(pack, **PREFETCH) as llm:
        assert generate(llm, PROMPTS) == expected
        ahead = list(model_of(llm).model.layers)[1::2]  # the last of each group of two
        nbytes = sum(value.nbytes for layer in ahead for name, value in layer.named_parameters() if "trellis" in name)
        offloaded = sum(value.nbytes for layer in ahead for value in layer.parameters())
        assert get_offloader().total_offloaded_bytes == offloaded > nbytes > 0
    assert runtime_diagnostics()["models"][-1]["bytes"]["trellis in host memory"] == nbytes


@pytest.mark.parametrize("pack", [DENSE, MOE])
def test_whole_layers_in_mapped_host_memory(pack: Path) -> None:
    expected = plain_tokens(pack)
    with serving(pack, offload_backend="uva", cpu_offload_gb=1) as llm:
        assert generate(llm, PROMPTS) == expected
        layers = model_of(llm).model.layers
        assert all(in_host_memory(parameter) for layer in layers for parameter in layer.parameters())
        nbytes = sum(value.nbytes for name, value in layers.named_parameters() if "trellis" in name)
    assert runtime_diagnostics()["models"][-1]["bytes"]["trellis in host memory"] == nbytes


@pytest.mark.parametrize(
    ("pack", "mode"),
    [
        (DENSE, "graphs"),
        (MOE, "eager"),
        pytest.param(DENSE, "eager", marks=pytest.mark.slow),
        pytest.param(MOE, "graphs", marks=pytest.mark.slow),
    ],
)
def test_sleeping_and_reloading(pack: Path, mode: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.sleeping", str(pack), mode]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


def next_token(llm: LLM, requests: list[LoRARequest | None]) -> torch.Tensor:
    """Log-probabilities after the prompt, one batch: float64 ``[requests, vocabulary]``."""
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprobs=-1)
    prompts = [{"prompt_token_ids": PROMPT} for _ in requests]
    outputs = llm.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
    entries = [output.outputs[0].logprobs[0] for output in outputs]
    return torch.tensor([[entry[token].logprob for token in range(len(entry))] for entry in entries]).double()


@pytest.mark.parametrize("eager", [pytest.param(True, marks=pytest.mark.slow), False])
def test_adapters_in_one_batch(tmp_path: Path, eager: bool) -> None:
    """Among them a request without one, which vLLM keeps apart on GPUs; the oracle is the decoded model."""
    adapters = [adapter(tmp_path / str(n), scale, EVERY_LAYER, seed=n) for n, scale in ((1, 0.05), (2, 0.2))]
    requests = [None] + [LoRARequest(str(n), n, path) for n, path in enumerate(adapters, 1)]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_logprobs": -1, "enforce_eager": eager}
    with serving(DENSE, **options) as llm:
        alone = [with_adapters(llm, [request])[0] for request in requests]
        assert with_adapters(llm, requests) == alone
        ours = next_token(llm, requests)
    with serving(write_dense_twin(DENSE, tmp_path / "dense"), **{**options, "enforce_eager": True}) as llm:
        dense = next_token(llm, requests)
    assert len({tuple(found) for found in alone}) == len(requests)
    apart = min(torch.dist(dense[first], dense[second]) for first, second in ((0, 1), (0, 2), (1, 2)))
    assert torch.dist(ours, dense) < 0.05 * apart, (ours, dense)


def test_a_pack_accepts_what_it_drafts_itself() -> None:
    """Graphs too: drafting and checking runs other batch sizes than decoding does."""
    expected = plain_tokens(DENSE)
    draft = {"model": str(DENSE), "method": "draft_model", "num_speculative_tokens": 3}
    with serving(DENSE, enforce_eager=False, disable_log_stats=False, speculative_config=draft) as llm:
        assert [row[:16] for row in generate(llm, PROMPTS, 32)] == expected
        assert acceptance(llm) > 0.9


@pytest.mark.parametrize(
    ("draft", "graphs"),
    [
        ("exl3", "whole steps"),
        ("mixed", "whole steps"),
        ("foreseeing", "whole steps"),
        ("foreseeing", "pieces too"),
        pytest.param("exl3", "pieces too", marks=pytest.mark.slow),
        pytest.param("mixed", "pieces too", marks=pytest.mark.slow),
    ],
)
def test_a_pack_s_own_draft_layer_changes_no_token(tmp_path: Path, draft: str, graphs: str) -> None:
    """Graphs of whole steps need no compiler; vLLM's default captures compiled pieces beside them."""
    pack = write_mtp_pack(tmp_path / draft, draft)
    expected = tokens(pack)
    with serving(pack, enforce_eager=False, **WHOLE_STEPS if graphs == "whole steps" else {}, **MTP) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        assert generate(llm, PROMPTS) == expected
        assert draft != "foreseeing" or acceptance(llm) > 0.9


@pytest.mark.parametrize("pack", [DENSE, MOE])
def test_compiled_kernels_that_overlap_change_no_token(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Inductor let the next kernel start before they end, and kernels of this package are among them.

    Graphs are captured of the one batch that is decoded, of all prompts together.
    """
    found = {}
    graphs = {"cudagraph_capture_sizes": [len(PROMPTS)]}
    for variable, asked in (("0", None), ("auto", True)):
        monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", variable)
        with serving(pack, enforce_eager=False, compilation_config=graphs) as llm:
            compilation = llm.llm_engine.vllm_config.compilation_config
            assert compilation.inductor_compile_config.get("triton.enable_pdl") is asked
            found[variable] = [generate(llm, PROMPTS, 48) for _ in range(4)]
    assert found["0"] == found["auto"]


def test_a_second_engine_shares_the_process_and_memory_comes_back() -> None:
    expected = tokens(MOE)  # what kernels and libraries keep for good is there from here on
    gc.collect()
    before = torch.cuda.memory_allocated()
    # vLLM makes the process groups of experts with the first engine or not at all
    with serving(MOE) as first, serving(DENSE) as second:
        other = generate(second, PROMPTS)
        assert generate(first, PROMPTS) == expected
        assert generate(second, PROMPTS) == other
        assert torch.cuda.memory_allocated() > before + (512 << 20)
        del first, second
    gc.collect()
    assert torch.cuda.memory_allocated() < before + (16 << 20)


@pytest.mark.parametrize("load_format", ["fastsafetensors", "instanttensor", "runai_streamer"])
@pytest.mark.parametrize("pack", [DENSE, MOE])
def test_loaders_that_deliver_to_the_gpu(pack: Path, load_format: str) -> None:
    """Some hand over views of a buffer that they use again."""
    pytest.importorskip("runai_model_streamer" if load_format == "runai_streamer" else load_format)
    expected = plain_tokens(pack)
    assert tokens(pack, load_format=load_format) == expected


def test_a_row_coded_embedding_is_looked_up_by_its_kernel() -> None:
    """The pack's table has rows of codes; its graphs contain the look-up."""
    expected = tokens(ROW_CODED)
    assert runtime_diagnostics()["models"][-1]["kernels"]["embedding"]["backend"] == "native"
    assert tokens(ROW_CODED, enforce_eager=False) == expected
