"""Whole engines on a GPU: weights in host memory, sleeping, adapters in one batch. vLLM's own CUDA build is needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm import LLM
from vllm.lora.request import LoRARequest

from tests.serving.engine import PROMPTS, engine, generate, model_of
from tests.serving.test_lora import adapter, with_adapters
from vllm_exl3 import runtime_diagnostics
from vllm_exl3.serving.offload import PARAMETERS, in_host_memory, inspect_exl3_moe_uva_layer

PACKS = Path(__file__).parents[1] / "data" / "packs"
DENSE, MOE = PACKS / "llama_odd-4.0-mul1", PACKS / "qwen3_moe-3.0-mul1"
EXPERTS = {"offload_backend": "uva", "cpu_offload_gb": 1, "cpu_offload_params": set(PARAMETERS)}
PREFETCH = {
    "offload_backend": "prefetch",
    "offload_group_size": 2,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
}


@contextmanager
def serving(pack: Path, **options: Any) -> Iterator[LLM]:
    # a cache of a given size, so that other engines on the GPU do not disturb vLLM's measuring
    with engine(pack, **{"dtype": "float16", "kv_cache_memory_bytes": 256 << 20, **options}) as llm:
        yield llm


def tokens(pack: Path, **options: Any) -> list[list[int]]:
    with serving(pack, **options) as llm:
        return generate(llm, PROMPTS)


def test_experts_in_mapped_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(MOE)
    monkeypatch.setenv("VLLM_EXL3_REQUIRE_UVA_EXPERTS", "1")
    with serving(MOE, **EXPERTS) as llm:
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
    expected = tokens(pack)
    assert tokens(pack, **PREFETCH) == expected


def test_whole_layers_in_mapped_host_memory() -> None:
    expected = tokens(DENSE)
    with serving(DENSE, offload_backend="uva", cpu_offload_gb=1) as llm:
        assert generate(llm, PROMPTS) == expected
        layers = model_of(llm).model.layers
        assert all(in_host_memory(parameter) for layer in layers for parameter in layer.parameters())


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("pack", [DENSE, MOE])
def test_sleeping_and_reloading(pack: Path, eager: bool) -> None:
    with serving(pack, enable_sleep_mode=True, enforce_eager=eager) as llm:
        expected = generate(llm, PROMPTS)
        llm.sleep(level=1)
        llm.wake_up()
        assert generate(llm, PROMPTS) == expected
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm, PROMPTS) == expected


def test_adapters_in_one_batch(tmp_path: Path) -> None:
    """Among them a request without one, which vLLM keeps apart on GPUs."""
    requests = [None] + [LoRARequest(str(n), n, adapter(tmp_path / str(n), scale)) for n, scale in ((1, 1.0), (2, 0.3))]
    with serving(DENSE, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        alone = [with_adapters(llm, [request])[0] for request in requests]
        assert with_adapters(llm, requests) == alone
    assert len({tuple(found) for found in alone}) == len(requests)
