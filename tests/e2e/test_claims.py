"""What limitations.md and support-matrix.md say rests on tests that are there: none is said without one."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.claims import LIMITATIONS, MATRIX

ROOT = Path(__file__).resolve().parents[2]


def bullets() -> list[str]:
    """Every entry of limitations.md, without the stars of its bold words."""
    text = (ROOT / "docs/limitations.md").read_text()
    return [" ".join(entry.split()).removeprefix("**") for entry in re.findall(r"^- (.*(?:\n  .*)*)", text, re.M)]


def rows() -> list[str]:
    """The first cell of every row of support-matrix.md, but for headings and what a run of tests/gpu has written."""
    lines = [line for line in (ROOT / "docs/support-matrix.md").read_text().splitlines() if line.startswith("|")]
    headings = {lines[index - 1] for index, line in enumerate(lines) if re.fullmatch(r"[|\s:-]*-[|\s:-]*", line)}
    cells = [line.split("|")[1].strip() for line in lines if line not in headings]
    return [cell for cell in cells if not re.fullmatch(r"[\s:-]*|`tests/gpu/.*", cell)]


@pytest.mark.parametrize(
    ("said", "table"), [(bullets(), LIMITATIONS), (rows(), MATRIX)], ids=["limitations", "support matrix"]
)
def test_every_sentence_has_its_tests_and_every_entry_its_sentence(
    said: list[str], table: Mapping[str, tuple[str, ...]]
) -> None:
    assert len(said) > 20
    without = [text for text in said if sum(text.startswith(key) for key in table) != 1]
    assert not without, "add these to tests/e2e/claims.py, with the tests that fail once they stop being true"
    assert not [key for key in table if sum(text.startswith(key) for text in said) != 1], "said no longer"


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("evidence", sorted({name for names in (LIMITATIONS | MATRIX).values() for name in names}))
def test_what_a_sentence_rests_on_is_there(evidence: str) -> None:
    path, _, name = evidence.partition("::")
    if path.endswith(".json"):
        assert (ROOT / "benchmarks/results" / path).exists()
        return
    found = functions(ROOT / "tests" / path)
    assert name in found if name else any(test.startswith("test_") for test in found)
