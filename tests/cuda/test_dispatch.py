"""Which form serves how many tokens where."""

import pytest

from vllm_exl3 import env
from vllm_exl3.cuda import linear
from vllm_exl3.cuda.compiler import ARCHITECTURES
from vllm_exl3.cuda.dispatch import choose_form, crossover, modelled, origin
from vllm_exl3.cuda.geometry import Form
from vllm_exl3.cuda.prefill import serves
from vllm_exl3.cuda.runtime import architecture_of
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import Codebook

MUL1, MCG, MIXED = frozenset({Codebook.MUL1}), frozenset({Codebook.MCG}), frozenset({Codebook.MUL1, Codebook.MCG})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("codebooks", [MUL1, MCG, MIXED], ids=["mul1", "mcg", "mixed"])
def test_forms_hold_a_batch_and_classes_are_intervals(architecture: str, codebooks: frozenset[int]) -> None:
    forms = [choose_form(codebooks, rows, architecture) for rows in range(1, 300)]
    classes = [(form.identity, form.wide) for form in forms]
    assert classes == sorted(classes, key=lambda kind: (not kind[0], kind[1]))
    for rows, form in enumerate(forms, 1):
        assert form.tile_rows >= min(rows, 16)
        assert not form.wide or typical_limits(architecture).warpgroups


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_one_class_serves_every_batch_when_asked(architecture: str) -> None:
    forms = {choose_form(MUL1, rows, architecture, one_class=True) for rows in range(1, 300)}
    assert len({(form.identity, form.wide) for form in forms}) == 1


def test_crossovers_say_where_they_come_from() -> None:
    assert crossover("sm_90a").measured == "NVIDIA H200"
    assert crossover("sm_89") == modelled()
    assert modelled().measured is None


@pytest.mark.parametrize(
    ("architecture", "gpu", "said"),
    [
        ("sm_90a", "NVIDIA H200", "as measured on NVIDIA H200"),
        ("sm_90a", "NVIDIA H100", "as measured on NVIDIA H200; NVIDIA H100 is taken to be alike (sm_90a)"),
        ("sm_89", "NVIDIA L4", "by a model, as nobody has measured sm_89"),
    ],
)
def test_crossovers_are_told_in_words(architecture: str, gpu: str, said: str) -> None:
    assert origin(architecture, gpu) == f"the kernel for each number of tokens is chosen {said}"


def test_mul1_by_the_integer_identity_at_few_tokens() -> None:
    assert choose_form(MUL1, 1, "sm_90a") == Form(True, 4)
    assert choose_form(MUL1, 16, "sm_90a") == Form(False, 16)
    assert choose_form(MUL1, 33, "sm_90a") == Form(False, 64)
    assert choose_form(MUL1, 33, "sm_80") == Form(False, 16)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_fast_mode_serves_what_one_product_of_int8_holds(architecture: str) -> None:
    chosen = {rows: choose_form(MUL1, rows, architecture, fast=True) for rows in range(1, 20)}
    assert {rows for rows, form in chosen.items() if form.fast} == {5, 6, 7, 8}
    assert chosen[8] == Form(True, 8, fast=True)
    assert all(form == choose_form(MUL1, rows, architecture) for rows, form in chosen.items() if not form.fast)
    assert not choose_form(MUL1, 8, architecture, one_class=True, fast=True).fast


def test_fast_mode_is_asked_for_and_takes_mul1_of_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = typical_limits("sm_90a")
    good, coarse, other = (
        Shard(half_bits, codebook, 256, 256, 0, 256) for half_bits, codebook in ((8, 2), (10, 2), (8, 1))
    )
    assert not linear.choose_form((good,), 8, limits).fast
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    assert linear.choose_form((good,), 8, limits).fast
    assert linear.choose_form((good,), 8, limits).name == "fast8"
    for shards in ((coarse,), (good, other)):
        assert not linear.choose_form(shards, 8, limits).fast
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not linear.choose_form((good,), 8, limits).fast


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_takes_over_once(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = typical_limits(architecture)
    layers = [
        (Shard(8, Codebook.MUL1, width, height, 0, height),)
        for width, height in ((4096, 4096), (8192, 28672), (128, 128))
    ]
    for layer in layers:
        served = [serves(layer, rows, limits) for rows in range(1, 300)]
        assert served == sorted(served) and not served[0] and served[-1]
    assert not serves((*layers[0], *layers[1]), 1000, limits)  # two widths
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not any(serves(layer, 1000, limits) for layer in layers)


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("0", False), ("", False), ("true", True)])
def test_batch_invariance_is_vllms_own_variable(value: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert env.batch_invariant() is asked


def test_architectures_are_exact() -> None:
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert tuple(architecture_of(capability) for capability in capabilities) == ARCHITECTURES
    with pytest.raises(ValueError, match="sm_70"):
        typical_limits("sm_70")
