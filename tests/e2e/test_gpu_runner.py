"""The runner of tests/gpu, on tests that need no GPU: each runs once, whatever becomes of the processes."""

from pathlib import Path

from tests.gpu.run import Run, table
from tests.gpu.worker import DURATIONS

EVERY = """
import os
import signal
import time
from pathlib import Path

import pytest

def note(name):
    with (Path(__file__).parent / "ran").open("a") as file:
        file.write(name + "\\n")

@pytest.mark.parametrize("n", range(8))
def test_good(n):
    note(f"good {n}")
    time.sleep(0.1)

def test_bad():
    note("bad")
    assert 1 == 2, "not so"

def test_skipped():
    pytest.skip("no such thing here")

def test_dies():
    note("dies")
    os.kill(os.getpid(), signal.SIGKILL)
"""
WHOLE_FILE = "import pytest\npytest.skip('needs two GPUs', allow_module_level=True)\ndef test_none(): pass\n"
ENDLESS = "import time\ndef test_quick(): pass\ndef test_endless(): time.sleep(600)\n"


def outcomes(folder: Path, files: dict[str, str], seconds: float) -> dict[str, tuple[str, str]]:
    """Outcome and reason of every test, by its name."""
    for name, text in files.items():
        (folder / name).write_text(text)
    options = ["--rootdir", str(folder), "-c", "/dev/null"]
    run = Run(folder / "run", folder / "caches", [str(folder)], options, processes=2)
    (folder / "run" / DURATIONS).write_text('{"test_every.py::test_good[7]": 30, "test_every.py::test_dies": 20}')
    run.work(seconds)
    rows = run.rows()
    assert len({row["test"] for row in rows}) == len(rows)
    assert all(str(row["test"]) in table(rows) for row in rows if row["outcome"] != "passed")
    return {row["test"].rpartition("::")[2]: (row["outcome"], str(row.get("reason", ""))) for row in rows}


def test_every_test_runs_once(tmp_path: Path) -> None:
    found = outcomes(tmp_path, {"test_every.py": EVERY, "test_file.py": WHOLE_FILE}, 60)
    assert found.pop("test_file.py") == ("skipped", "needs two GPUs")
    assert found.pop("test_skipped") == ("skipped", "no such thing here")
    assert found.pop("test_dies") == ("failed", "its process died")
    outcome, reason = found.pop("test_bad")
    assert outcome == "failed" and "not so" in reason
    assert found == {f"test_good[{n}]": ("passed", "") for n in range(8)}
    ran = (tmp_path / "ran").read_text().splitlines()
    assert sorted(ran) == sorted(["bad", "dies", *(f"good {n}" for n in range(8))])
    assert ran.index("good 7") < 2  # what is expected to last longest begins


def test_what_does_not_end_in_time_is_no_pass(tmp_path: Path) -> None:
    found = outcomes(tmp_path, {"test_endless.py": ENDLESS}, 4)
    assert found == {"test_quick": ("passed", ""), "test_endless": ("not run", "the time was over while it ran")}
