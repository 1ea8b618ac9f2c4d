"""Offloaded weights: the guard for experts in mapped host memory, and layers whose parameters move after loading."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm_exl3
from tests.serving.conftest import PACKS
from tests.serving.engine import PROMPTS, engine, generate, model_of
from vllm_exl3.serving import offload
from vllm_exl3.serving.offload import PARAMETERS, compute_device, in_host_memory

VARIABLE = "VLLM_EXL3_REQUIRE_UVA_EXPERTS"
QWEN = "qwen3_moe-3.0-mul1"
ODD = "llama_odd-4.0-mul1"
ROW_CODED = "qwen3-2.25-mul1-emb4"


def payload(place: str) -> Any:
    """What vLLM leaves for a parameter in one of the four places, as far as attributes show it."""
    sizes = {"placeholder": 0}
    fake = SimpleNamespace(
        device=torch.device("cpu" if place == "fallback" else "cuda"),
        is_meta=False,
        numel=lambda: sizes.get(place, 4096),
    )
    if place in ("mapped", "placeholder"):
        fake._vllm_is_uva_offloaded = True
    return fake


def layer_of(places: dict[str, str] | str) -> Any:
    """A fake layer; a name that is left out is missing."""
    if isinstance(places, str):
        places = dict.fromkeys(PARAMETERS, places)
    return SimpleNamespace(**{name: payload(place) for name, place in places.items()})


def but(name: str, place: str | None) -> dict[str, str]:
    """Everything mapped, but one."""
    places = dict.fromkeys(PARAMETERS, "mapped")
    if place is None:
        del places[name]
    else:
        places[name] = place
    return places


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ("fallback", r"w13_trellis, .*ordinary CPU tensors.*VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"),
        (but("w2_suh", "fallback"), r"found w2_suh as ordinary CPU tensors"),
        (but("w2_trellis", "resident"), r"only w13_trellis, .* mapped, and w2_trellis on the GPU"),
        (but("w13_svh", "placeholder"), r"found w13_svh without contents"),
        (but("w2_svh", None), r"found no w2_svh"),
        ("resident", r"none of its payloads mapped by vLLM's UVA offloader"),
    ],
)
def test_experts_that_are_not_mapped_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, places: dict[str, str] | str, message: str
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(RuntimeError, match=message) as error:
        vllm_exl3.validate_exl3_moe_uva_layer(layer_of(places), "model.layers.3.mlp.experts")
    text = str(error.value)
    assert text.startswith("model.layers.3.mlp.experts: ") and "--cpu-offload-params w13_trellis" in text
    monkeypatch.setenv(VARIABLE, "0")
    assert not vllm_exl3.validate_exl3_moe_uva_layer(layer_of(places)).fully_uva_offloaded


def test_mapped_experts_pass_and_other_layers_are_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert vllm_exl3.uva_expert_offload_required()
    status = vllm_exl3.validate_exl3_moe_uva_layer(layer_of("mapped"))
    assert status.fully_uva_offloaded and not status.partially_uva_offloaded and status.required
    assert status.uva_parameters == status.parameter_segments == PARAMETERS
    assert not vllm_exl3.validate_exl3_moe_uva_layer(layer_of({})).applicable
    assert json.loads(json.dumps(status.as_dict()))["fully_uva_offloaded"] is True


@pytest.mark.parametrize("places", [dict(zip(PARAMETERS, p, strict=True)) for p in itertools.permutations(
    ("mapped", "mapped", "mapped", "fallback", "resident", "placeholder"))][::37])  # fmt: skip
def test_every_payload_is_in_exactly_one_place(places: dict[str, str]) -> None:
    status = vllm_exl3.inspect_exl3_moe_uva_layer(layer_of(places))
    found = {
        "mapped": status.uva_parameters,
        "fallback": status.cpu_fallback_parameters,
        "resident": status.resident_parameters,
        "placeholder": status.placeholder_parameters,
    }
    assert {place: {n for n in PARAMETERS if places[n] == place} for place in found} == {
        place: set(names) for place, names in found.items()
    }
    assert status.partially_uva_offloaded and not status.missing_parameters


def test_a_marker_on_memory_of_the_gpu_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier plugin reported experts as mapped that lay in the card's own memory."""
    monkeypatch.setattr(offload, "_is_host_memory", lambda parameter: False)
    status = vllm_exl3.inspect_exl3_moe_uva_layer(layer_of("mapped"))
    assert status.resident_parameters == PARAMETERS and not status.uva_parameters


def test_an_engine_whose_experts_are_not_mapped_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM never offloads on a CPU; the layer and the remedy are named before weights are read."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.default_loader.safetensors_weights_iterator",
        lambda *_, **__: pytest.fail("weights were read"),
    )
    with (
        pytest.raises(RuntimeError, match=r"model\.layers\.0\.mlp\.experts.*ordinary CPU tensors"),
        engine(PACKS / QWEN),
    ):
        pass


@pytest.mark.slow
def test_a_dense_pack_is_served_whatever_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with engine(PACKS / ODD) as llm:
        assert generate(llm, [[1, 2, 3]], 2)


def test_the_helpers_are_imported_late() -> None:
    code = "import sys, vllm_exl3; assert 'vllm' not in sys.modules; vllm_exl3.inspect_exl3_moe_uva_layer"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        vllm_exl3.no_such_name  # noqa: B018


def test_where_a_layer_runs_is_not_where_offloading_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(2, 2)
    assert compute_device(layer).type == "cpu" and not in_host_memory(layer.weight)
    monkeypatch.setattr(offload, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 3)
    assert compute_device(layer) == torch.device("cuda", 3) and in_host_memory(layer.weight)


def move(model: torch.nn.Module) -> None:
    """What prefetching does after loading: parameters point to other buffers, and the old ones hold other things."""
    for parameter in model.parameters():
        old, parameter.data = parameter.data, parameter.data.clone()
        old.zero_()


def replace_for_each_call(model: torch.nn.Module) -> None:
    """What offloading without UVA does: every forward of a decoder layer gets copies, made for it."""
    for layer in model.model.layers:
        copies = {name: value.clone() for name, value in layer.state_dict().items()}
        for value in layer.state_dict().values():
            value.zero_()

        def forward(
            *args: Any, _layer: Any = layer, _forward: Any = layer.forward, _copies: Any = copies, **kwargs: Any
        ) -> Any:
            _layer.forward, current = _forward, _layer.forward
            output = torch.func.functional_call(_layer, _copies, args, kwargs, tie_weights=False)
            _layer.forward = current
            return output

        layer.forward = forward


@pytest.mark.parametrize("change", [move, replace_for_each_call])
@pytest.mark.parametrize("pack", [QWEN, pytest.param(ROW_CODED, marks=pytest.mark.slow)])
def test_parameters_may_move_after_loading(pack: str, change: Callable[[torch.nn.Module], None]) -> None:
    with engine(PACKS / pack) as llm:
        before = generate(llm, PROMPTS)
        change(model_of(llm))
        assert generate(llm, PROMPTS) == before
