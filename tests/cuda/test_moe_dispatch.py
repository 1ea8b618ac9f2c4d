"""Which MoE kernels serve how many tokens."""

import pytest

from tests.cuda.moe_shapes import H200, LAYERS, MCG, MUL1, UNIFORM, layer
from vllm_exl3.cuda.compiler import ARCHITECTURES
from vllm_exl3.cuda.moe_dispatch import Choice, choose, decode_rows, every_form
from vllm_exl3.cuda.moe_gemm import forms
from vllm_exl3.cuda.moe_geometry import Layer, MoeForm
from vllm_exl3.cuda.survey import typical_limits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", LAYERS)
def test_classes_are_intervals_of_the_batch_size(name: str, architecture: str) -> None:
    limits, seen = typical_limits(architecture), []
    for tokens in [*range(1, 70), 128, 300, 1000, 4000, 9000, 100_000]:
        choice = choose(LAYERS[name], tokens, limits)
        assert choice.form in every_form(LAYERS[name], limits)
        assert choice.form in forms(limits)
        assert not choice.form.wide or limits.warpgroups
        seen.append(not choice.form.identity)
    assert seen == sorted(seen)
    assert not seen[0]
    assert seen[-1]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_one_class_serves_every_batch_when_asked(architecture: str) -> None:
    limits = typical_limits(architecture)
    found = {choose(LAYERS["mul1"], tokens, limits, one_class=True).form for tokens in (1, 8, 100, 9000)}
    assert {(form.identity, form.wide) for form in found} == {(False, limits.warpgroups)}


@pytest.mark.parametrize(("kinds", "middle"), [(1, 256), (3, 256), (4, 128), (7, 128), (11, 128)])
def test_row_blocks_follow_the_rows_an_expert_has(kinds: int, middle: int) -> None:
    """Row blocks of 128 serve layers of many kinds, whose widest kernel has two widths of product, and no others."""
    shape = layer(tuple((projection, 2 + kind, MUL1) for kind in range(kinds) for projection in range(3)))
    found = {rows: choose(shape, rows * 128 // 8, H200).form.tile_rows for rows in (8, 24, 25, 52, 53, 106, 107, 400)}
    assert found == {8: 32, 24: 32, 25: 64, 52: 64, 53: middle, 106: middle, 107: 256, 400: 256}
    assert (MoeForm(False, 128) in every_form(shape, H200)) == (middle == 128)


def test_wide_inputs_do_not_overflow_integer_sums() -> None:
    wide = Layer(UNIFORM, 8, 8, 2, 20480, 768)
    assert not choose(wide, 1, H200).form.identity
    assert choose(layer(tuple((p, 6, MCG) for p in range(3))), 1, H200).form.identity


@pytest.mark.parametrize(
    ("variables", "name", "rows"),
    [
        ({"NATIVE_MOE_MAX_ROWS": "5"}, "mul1", 5),
        ({"NATIVE_MOE_MAX_ROWS": "0"}, "mul1", 0),
        ({"NATIVE_MOE_MAX_ROWS_K4": "0"}, "mul1", 0),
        ({"NATIVE_MOE_MAX_ROWS": "5", "NATIVE_MOE_MAX_ROWS_K4": "7"}, "mul1", 7),
        ({"NATIVE_MOE_MAX_ROWS": "5", "NATIVE_MOE_MAX_ROWS_K4": "7"}, "mcg", 5),
        ({"NATIVE_MOE_MAX_ROWS": "5", "NATIVE_MOE_MAX_ROWS_K8": "3"}, "mixed", 3),
        ({"NATIVE_MOE_MAX_ROWS_K2": "2", "NATIVE_MOE_MAX_ROWS_K3": "6"}, "no gate", 6),  # K = 3 and 2.5
    ],
)
def test_row_caps_decide_the_path(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str, rows: int
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(f"VLLM_EXL3_{variable}", value)
    assert decode_rows(LAYERS[name]) == rows
    assert all(choose(LAYERS[name], tokens, H200).form.identity for tokens in range(1, rows + 1))
    assert not choose(LAYERS[name], rows + 1, H200).form.identity


@pytest.mark.parametrize(("half_bits", "rows"), [((8,), 64), ((4,), 64), ((4, 8), 64), ((6,), 56), ((8, 10), 56)])
def test_the_decode_path_serves_as_many_tokens_as_were_measured_to_pay(half_bits: tuple[int, ...], rows: int) -> None:
    """4 tokens an expert with K = 2 and 4, 3.5 with others."""
    kinds = tuple((projection, each, MUL1) for projection in range(3) for each in half_bits)
    assert decode_rows(layer(kinds)) == rows


def test_grouped_prefill_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(LAYERS["mul1"], 5000, H200).form.wide
    monkeypatch.setenv("VLLM_EXL3_GROUPED_PREFILL", "0")
    assert choose(LAYERS["mul1"], 5000, H200) == Choice(MoeForm(True, 4), 2048, 2)


def test_the_fat_threshold_is_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(LAYERS["mul1"], 5000, H200).fat_rows == choose(LAYERS["mul1"], 5000, H200).form.tile_rows // 2
    monkeypatch.setenv("VLLM_EXL3_FAT_THRESHOLD", "0")
    assert choose(LAYERS["mul1"], 5000, H200).fat_rows == 0
