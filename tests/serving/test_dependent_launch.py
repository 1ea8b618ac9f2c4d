"""Asking Inductor for kernels that let the next one start early: when, and that vLLM's compiler hears of it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import config as inductor

from tests.serving.conftest import PACKS
from tests.serving.engine import engine
from vllm_exl3.serving import dependent_launch
from vllm_exl3.serving.dependent_launch import INDUCTOR_OPTION, let_compiled_kernels_overlap


class Platform:
    """A GPU of some capability, or none."""

    def __init__(self, capability: int | None) -> None:
        self.capability = capability

    def is_cuda(self) -> bool:
        return self.capability is not None

    def has_device_capability(self, least: int) -> bool:
        assert self.capability is not None
        return self.capability >= least


@pytest.mark.parametrize(
    ("capability", "variable", "known", "before", "after"),
    [
        (90, "1", True, {}, {INDUCTOR_OPTION: True}),
        (120, "auto", True, {"size_asserts": False}, {"size_asserts": False, INDUCTOR_OPTION: True}),
        (90, "1", True, {INDUCTOR_OPTION: False}, {INDUCTOR_OPTION: False}),
        (90, "0", True, {}, {}),
        (90, "1", False, {}, {}),
        (89, "1", True, {}, {}),
        (None, "auto", True, {}, {}),
        (None, "1", True, {}, {}),
    ],
)
def test_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capability: int | None,
    variable: str,
    known: bool,
    before: dict[str, bool],
    after: dict[str, bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dependent_launch, "current_platform", Platform(capability))
    if not known:
        monkeypatch.delattr(inductor.triton, "enable_pdl")
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        assert asked(monkeypatch, variable, before) == after
    told = [record.getMessage() for record in caplog.records]
    unmet = variable == "1" and (not known or capability != 90)
    assert [line.startswith("VLLM_EXL3_DEPENDENT_LAUNCH=1 changes nothing here: ") for line in told] == [True] * unmet


@pytest.mark.parametrize(
    ("variable", "model", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"hybrid": True}, None),
        ("auto", {"attention_free": True}, None),
        ("auto", {"adapters": True}, None),
        ("auto", {"others": (False, False)}, True),
        ("auto", {"others": (True, False)}, None),
        ("auto", {"others": (False, True)}, None),
        ("1", {"hybrid": True}, True),
        ("1", {"adapters": True}, True),
        ("0", {}, None),
    ],
)
def test_models_whose_kernels_do_not_all_wait_are_left_out(
    monkeypatch: pytest.MonkeyPatch, variable: str, model: dict[str, Any], expected: bool | None
) -> None:
    """One with a state as target or draft leaves the other out, too: both have the same options."""
    monkeypatch.setattr(dependent_launch, "current_platform", Platform(90))
    assert asked(monkeypatch, variable, {}, **model).get(INDUCTOR_OPTION) is expected


def asked(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    before: dict[str, bool],
    hybrid: bool = False,
    attention_free: bool = False,
    adapters: bool = False,
    others: tuple[bool, bool] | None = None,
) -> dict[str, bool]:
    """What a model's compiler is told; ``others``: whether a target and a draft carry a state, where there are two."""
    monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", variable)
    options = dict(before)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(inductor_compile_config=options),
        lora_config=object() if adapters else None,
        model_config=SimpleNamespace(is_hybrid=hybrid, is_attention_free=attention_free),
        speculative_config=None,
    )
    if others is not None:
        target, draft = (SimpleNamespace(is_hybrid=state, is_attention_free=False) for state in others)
        config.speculative_config = SimpleNamespace(target_model_config=target, draft_model_config=draft)
    let_compiled_kernels_overlap(config)
    return options


def test_nothing_is_asked_for_outside_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "current_platform", Platform(90))
    monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", "1")
    let_compiled_kernels_overlap(None)


@pytest.mark.parametrize(("variable", "expected"), [("auto", {}), ("1", {INDUCTOR_OPTION: True})])
def test_layers_that_are_built_without_a_model_are_left_out(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: dict[str, bool]
) -> None:
    monkeypatch.setattr(dependent_launch, "current_platform", Platform(90))
    monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", variable)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(inductor_compile_config={}),
        lora_config=None,
        model_config=None,
        speculative_config=None,
    )
    let_compiled_kernels_overlap(config)
    assert config.compilation_config.inductor_compile_config == expected


def test_inductor_takes_the_option() -> None:
    with inductor.patch({INDUCTOR_OPTION: True}):
        assert inductor.triton.enable_pdl


def test_the_compiler_of_a_model_s_graphs_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made after the layers, of the options as they are then; more than that is not run here."""
    heard: list[Any] = []

    def compiler(wrapper: Any, *_: Any, **__: Any) -> None:
        heard.append(wrapper.vllm_config.compilation_config.inductor_compile_config.get(INDUCTOR_OPTION))
        raise KeyboardInterrupt

    monkeypatch.setattr(dependent_launch, "_why_not", lambda: None)
    monkeypatch.setattr("vllm.compilation.decorators.TorchCompileWithNoGuardsWrapper.__init__", compiler)
    for variable in ("0", "auto"):
        monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", variable)
        with pytest.raises(KeyboardInterrupt), engine(PACKS / "llama_tied-1.0-3inst", enforce_eager=False):
            pass
    assert heard == [None, True]
