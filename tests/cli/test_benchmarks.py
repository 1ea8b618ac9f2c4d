"""Every benchmark tells how it is used where there is neither a GPU nor the CUDA bindings."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

PROGRAM = """
import contextlib, io, runpy, sys
sys.modules["cuda"] = None
sys.path.insert(0, sys.argv[1])
scripts, sys.argv = sys.argv[2:], ["", "--help"]
for script in scripts:
    sys.argv[0], said = script, io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code and "--help" in said.getvalue(), script
    else:
        raise AssertionError(script)
"""
"""All of them in one process: most of the time goes into imports that they share."""


def test_each_says_how_it_is_used() -> None:
    scripts = [str(file) for file in sorted(BENCHMARKS.glob("*.py")) if "__main__" in file.read_text(encoding="utf-8")]
    assert len(scripts) > 20
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), *scripts]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
