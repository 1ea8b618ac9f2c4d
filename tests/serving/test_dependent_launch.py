"""Asking Inductor for kernels that let the next one start early: when, and that vLLM's compiler hears of it."""

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
        (120, "1", True, {"size_asserts": False}, {"size_asserts": False, INDUCTOR_OPTION: True}),
        (90, "1", True, {INDUCTOR_OPTION: False}, {INDUCTOR_OPTION: False}),
        (90, "0", True, {}, {}),
        (90, "1", False, {}, {}),
        (89, "1", True, {}, {}),
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
) -> None:
    monkeypatch.setattr(dependent_launch, "current_platform", Platform(capability))
    monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", variable)
    if not known:
        monkeypatch.setattr(dependent_launch, "_inductor_knows", lambda: False)
    options = dict(before)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config=options))
    let_compiled_kernels_overlap(config)
    assert options == after


def test_nothing_is_asked_for_outside_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "current_platform", Platform(90))
    monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", "1")
    let_compiled_kernels_overlap(None)


def test_inductor_takes_the_option() -> None:
    with inductor.patch({INDUCTOR_OPTION: True}):
        assert inductor.triton.enable_pdl


def test_the_compiler_of_a_model_s_graphs_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made after the layers, of the options as they are then; more than that is not run here."""
    heard: list[Any] = []

    def compiler(wrapper: Any, *_: Any, **__: Any) -> None:
        heard.append(wrapper.vllm_config.compilation_config.inductor_compile_config.get(INDUCTOR_OPTION))
        raise KeyboardInterrupt

    monkeypatch.setattr(dependent_launch, "_device_overlaps", lambda: True)
    monkeypatch.setattr("vllm.compilation.decorators.TorchCompileWithNoGuardsWrapper.__init__", compiler)
    for variable in ("0", "1"):
        monkeypatch.setenv("VLLM_EXL3_DEPENDENT_LAUNCH", variable)
        with pytest.raises(KeyboardInterrupt), engine(PACKS / "llama_tied-1.0-3inst", enforce_eager=False):
            pass
    assert heard == [None, True]
