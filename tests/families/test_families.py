"""Every family whose packs exist: its pack gives the logits of its decoded dense twin, in the same stock vLLM."""

import json
from pathlib import Path

import pytest

from tests.families.compare import compare
from tests.families.family import Family, first_of_kinds, write
from tests.families.rows import FAMILIES
from tests.families.run import rows
from tests.serving.engine import PROMPTS, engine, generate, generate_on_two_ranks

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
        assert row.get("error", 1) <= row["bound"] and row["worst"] <= 2 * row["bound"], row
        assert (row["same_tokens"] or family.other_tokens) and not row["missing"], row
        return
    compared = compare(family, tmp_path)
    print(compared)
    bound = compared.bound
    assert compared.error <= bound and compared.worst <= 2 * bound and compared.same_tokens, compared
    assert all(text in compared.report for text in family.shows), compared.report


def test_what_is_recorded_is_within_its_bound() -> None:
    recorded = {row["name"]: row for row in json.loads(RESULTS.read_text())}
    assert recorded.keys() <= {family.name for family in FAMILIES}
    families = {family.name: family for family in FAMILIES}
    for name, row in recorded.items():
        if families[name].gpu:
            assert row["fault"] == families[name].gpu
        else:
            assert row["error"] <= row["bound"] and row["worst"] <= 2 * row["bound"], row
            assert row["same_tokens"] or families[name].other_tokens, row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4_text"])
def test_two_ranks_continue_alike(name: str, tmp_path: Path) -> None:
    pack, _ = write(next(family for family in FAMILIES if family.name == name), tmp_path)
    with engine(pack) as llm:
        expected = generate(llm, PROMPTS, 8)
    assert generate_on_two_ranks(pack, 8) == expected
