"""A share of the damaged packs that `make fuzz` has vLLM load, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SILENT = {
    *("bit_of_data", "exchange_alike", "exchange_modules", "hole", "tensor_of_another"),  # all headers are as before
    *("exchange", "flip_bit", "overwrite"),  # of these some change data alone
    *("config_of_another", "data_of_other_type", "tensor_dtype", "json_value"),  # possible values of another model
}
"""Damages that change logits without a word."""


@pytest.mark.slow
def test_damage_is_refused_or_changes_nothing_or_no_header_shows_it(tmp_path: Path) -> None:
    state = tmp_path / "loader.json"
    command = [sys.executable, "-m", "tests.fuzz.loader", "--seconds", "120", "--state", str(state)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    counted = json.loads(state.read_text())
    ends = {tuple(name.split(": ", 1)) for name in counted["ends"]}
    assert counted["loaded"] >= 20 and {"refused", "equal", "silent"} <= {end for _, end in ends}
    assert not {damage for damage, end in ends if end == "silent"} - SILENT
