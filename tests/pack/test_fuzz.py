"""A share of `make fuzz` in every run: damaged packs are opened or refused, never anything else."""

import itertools
import json
import random
import time
from pathlib import Path

import pytest

from tests.fuzz.campaign import SEEDS, Campaign, whole_pack
from tests.fuzz.mutations import MUTATIONS, mutate


@pytest.mark.parametrize("seconds", [10, pytest.param(120, marks=pytest.mark.slow)])
def test_damaged_packs_are_opened_or_refused(seconds: int, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    begin = time.monotonic()
    for number in itertools.count(10_000_000):  # not those that a campaign begins with
        campaign.case(number)
        if time.monotonic() - begin > seconds:
            break
    assert not campaign.found
    assert sum(campaign.ends.values()) > 5 * seconds
    ends = {end.partition(": ")[2] for end in campaign.ends}
    assert {"refused", "sound"} <= ends, "damage that nobody sees and damage that is seen"


def test_numbers_that_once_found_something_find_nothing_now(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    for number in json.loads(SEEDS.read_text()):
        campaign.case(number)
    assert not campaign.found


def test_an_exception_of_another_kind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = Campaign(tmp_path)
    monkeypatch.setattr("tests.fuzz.campaign.survey", lambda _: 1 / 0)
    numbers = range(200)
    assert {campaign.case(number) for number in numbers} == {"refused", "found"}
    assert "ZeroDivisionError" in next(iter(campaign.found.values()))


def test_a_number_stands_for_one_damaged_pack(tmp_path: Path) -> None:
    files = whole_pack(tmp_path)
    assert all(mutate(files, number) == mutate(files, number) for number in range(100))


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_kind_of_damage_changes_something(name: str, tmp_path: Path) -> None:
    files = whole_pack(tmp_path)
    changed = 0
    for number in range(20):
        damaged = dict(files)
        MUTATIONS[name](damaged, random.Random(number))
        changed += damaged != files
    assert changed >= 10
