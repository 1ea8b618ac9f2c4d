"""What an engine does between its start and its end: sleeping, reloading, sharing a process, letting go of memory.

vLLM ignores sleep on CPUs. What level 2 does to a model is known all the same: every parameter loses its contents,
buffers are put back, and reloading must restore the rest. `tests/gpu` has the real thing.
"""

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.serving.conftest import PACKS, golden_logits
from tests.serving.engine import PROMPTS, engine, generate, logits_of, model_of

ODD, PHI, GEMMA = "llama_odd-4.0-mul1", "phi3-5.0-mul1", "gemma2-6.0-mcg"
QWEN, ROW_CODED = "qwen3_moe-3.0-mul1", "qwen3-2.25-mul1-emb4"


def lose_contents(model: torch.nn.Module) -> None:
    """Level 2: memory is there again after waking up, with whatever lies in it."""
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0xFE)  # NaN in every floating-point type, nonsense in a trellis


@pytest.mark.parametrize(
    "name",
    [
        PHI,
        QWEN,
        pytest.param(GEMMA, marks=pytest.mark.slow),
        pytest.param(ROW_CODED, marks=pytest.mark.slow),
        pytest.param(ODD, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_lost_its_memory_is_restored_by_reloading(name: str) -> None:
    ids, _ = golden_logits(name)
    with engine(PACKS / name) as llm:
        before = logits_of(llm, ids)
        addresses = {key: parameter.data_ptr() for key, parameter in model_of(llm).named_parameters()}
        for _ in range(2):
            llm.sleep(level=2)
            lose_contents(model_of(llm))
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            torch.testing.assert_close(logits_of(llm, ids), before, rtol=0, atol=0)
        # captured graphs read the weights where they were
        assert {key: parameter.data_ptr() for key, parameter in model_of(llm).named_parameters()} == addresses


def tensors_in(value: Any, depth: int = 3) -> list[torch.Tensor]:
    """Tensors that an object keeps outside of its parameters."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, (torch.nn.Module, type)):
        return []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    own = getattr(value, "__dict__", {}).values() if type(value).__module__.startswith("vllm_exl3") else ()
    return [tensor for part in (*parts, *own) for tensor in tensors_in(part, depth - 1)]


@pytest.mark.parametrize("name", [QWEN])
def test_nothing_is_kept_on_a_device_beside_the_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated while loading is lost at level 2, and no reload would bring it back."""
    kept: list[torch.Tensor] = []
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading

    def process(model: torch.nn.Module, *args: Any) -> None:
        original(model, *args)
        for module in model.modules():
            kept.extend(tensors_in(getattr(module, "quant_method", None)))

    monkeypatch.setattr(base_loader, "process_weights_after_loading", process)
    with engine(PACKS / name):
        pass
    # host copies of an expert table are a few kilobytes and never leave the host
    assert all(tensor.device.type == "cpu" and tensor.dtype in (torch.int32, torch.int64) for tensor in kept)
    assert sum(tensor.nbytes for tensor in kept) < 1 << 16


@pytest.mark.slow
def test_a_second_engine_shares_the_process() -> None:
    with engine(PACKS / PHI) as llm:
        alone = generate(llm, PROMPTS)
    with engine(PACKS / ODD) as llm:
        other = generate(llm, PROMPTS)
    with engine(PACKS / PHI) as first, engine(PACKS / ODD) as second:
        assert generate(second, PROMPTS) == other
        assert generate(first, PROMPTS) == alone
        assert generate(second, PROMPTS) == other


def test_an_engine_that_ended_keeps_no_weights() -> None:
    with engine(PACKS / QWEN) as llm:
        model = weakref.ref(model_of(llm))
        weights = [weakref.ref(parameter) for parameter in model_of(llm).parameters()]
        del llm
    gc.collect()
    assert model() is None
    left = [weight() for weight in weights if weight() is not None]
    assert not left


def test_tables_of_experts_are_made_on_the_host_whatever_the_default_device_is() -> None:
    """vLLM builds models under the GPU's, and what is allocated there then is lost at level 2."""
    from vllm_exl3.ops.experts import Projection, pack_table

    fields = Projection.__dataclass_fields__
    with torch.device("meta"):
        table = pack_table([[Projection(*range(len(fields)))]])
    assert table.device.type == "cpu"


def test_tables_that_a_forward_made_on_a_gpu_take_a_reload() -> None:
    """vLLM runs models in inference mode and reloads outside of it; on a GPU, tables are copies that a forward made."""
    ids, _ = golden_logits(QWEN)
    with engine(PACKS / QWEN) as llm:
        before = logits_of(llm, ids)
        methods = [getattr(module, "quant_method", None) for module in model_of(llm).modules()]
        tables = [method._tables for method in methods if hasattr(method, "_tables")]
        assert tables
        for made in tables:
            with torch.inference_mode():
                made[torch.device("cpu")] = made[torch.device("cpu")].clone().zero_()
        llm.collective_rpc("reload_weights")
        torch.testing.assert_close(logits_of(llm, ids), before, rtol=0, atol=0)
