"""Every family whose packs exist: its pack gives the logits of its decoded dense twin, in the same stock vLLM."""

import json
from pathlib import Path

import pytest
import torch

from tests.families.compare import _first_choice, _Served, compare
from tests.families.family import Family, first_of_kinds, write
from tests.families.rows import FAMILIES
from tests.families.run import rows
from tests.serving.engine import PROMPTS, engine, generate, generate_on_two_ranks
from vllm_exl3.cpu import library

RESULTS = Path(__file__).with_name("results.json")

_QUICK = {"llama4_text"}
"""A row that was silently wrong once; all others are in `make test-all`: an engine and its twin take half a minute."""


def _rows() -> list[object]:
    return [
        pytest.param(family, id=family.name, marks=() if first and family.name in _QUICK else pytest.mark.slow)
        for family, first in first_of_kinds(family for family in FAMILIES if not family.gpu)
    ]


@pytest.mark.parametrize("family", _rows())
def test_logits_are_those_of_the_decoded_twin(family: Family, tmp_path: Path) -> None:
    if family.interpreted:
        (row,) = rows([family.name])
        assert row.get("served") and not row["missing"], row
        _check_kernels(row["kernels"])
        return
    compared = compare(family, tmp_path)
    print(compared)
    assert compared.is_served, compared
    assert all(text in compared.report for text in family.shows), compared.report
    _check_kernels(compared.kernels)


def _check_kernels(kernels: dict[str, str]) -> None:
    """No op fell to the plain reference: that is right, and slow, and only the report says so."""
    assert kernels and set(kernels.values()) == {"native"}, (kernels, library.unavailable())


@pytest.mark.parametrize(("gap", "is_tie"), [(0.01, True), (0.0, True), (0.07, False)])
def test_what_a_tie_is(gap: float, is_tie: bool) -> None:
    """Half of the vocabulary at 1, half at -1: a bound of 0.03 lets two logits come 0.06 closer."""
    logits = torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)
    logits[2] = 1.0 - gap
    served = [_Served(logits[None], [logits, logits], [5, token], "") for token in (2, 0)]
    choice = _first_choice(*served, 0.03)
    assert choice is not None and choice.index == 1 and choice.is_tie is is_tie
    assert choice.steps == pytest.approx(gap * 128) and choice.gap == pytest.approx(gap)
    assert _first_choice(served[1], served[1], 0.03) is None


def test_what_is_recorded_is_within_its_bound() -> None:
    recorded = {row["name"]: row for row in json.loads(RESULTS.read_text())}
    assert recorded.keys() <= {family.name for family in FAMILIES}
    families = {family.name: family for family in FAMILIES}
    for name, row in recorded.items():
        if families[name].gpu:
            assert row["fault"] == families[name].gpu
        else:
            assert row["error"] <= row["bound"] and row["worst"] <= 2 * row["bound"], row
            assert row["same_tokens"] or row["choice"]["is_tie"], row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4_text"])
def test_two_ranks_continue_alike(name: str, tmp_path: Path) -> None:
    pack, _ = write(next(family for family in FAMILIES if family.name == name), tmp_path)
    with engine(pack) as llm:
        expected = generate(llm, PROMPTS, 8)
    assert generate_on_two_ranks(pack, 8) == expected
