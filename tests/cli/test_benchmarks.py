"""Every benchmark tells how it is used, and those of GPUs that they need one, without a GPU and the CUDA bindings."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

PROGRAM = """
import contextlib, io, json, runpy, sys
sys.modules["cuda"] = None
sys.path.insert(0, sys.argv[1])
scripts, measuring = sys.argv[3:], json.loads(sys.argv[2])
for script in scripts:
    sys.argv, said = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code and "--help" in said.getvalue(), script
    else:
        raise AssertionError(script)
    if (words := measuring.get(script.rpartition("/")[2])) is not None:
        sys.argv = [script, *words]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert "nvidia-smi lists none here" in str(end.code), (script, end.code)
        else:
            raise AssertionError(script)
"""
"""All of them in one process: most of the time goes into imports that they share."""

MEASURING = {
    "gpu_embedding.py": ["--time"],
    "gpu_families.py": [],
    "gpu_gemm.py": ["--time"],
    "gpu_kv.py": [],
    "gpu_kv_serve.py": ["speed", "int4"],
    "gpu_linear.py": ["--time"],
    "gpu_load.py": [],
    "gpu_moe.py": ["--time"],
    "gpu_prefill.py": ["--time"],
    "gpu_prefill_int8.py": ["--time"],
    "gpu_serve.py": ["speed", "native"],
    "gpu_two.py": ["all"],
}
"""What starts a measurement; `gpu_two.py` once wrote a file of failures over the results of two GPUs."""


def test_each_says_how_it_is_used_and_what_it_lacks(tmp_path: Path) -> None:
    scripts = [str(file) for file in sorted(BENCHMARKS.glob("*.py")) if "__main__" in file.read_text(encoding="utf-8")]
    assert len(scripts) > 20
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), json.dumps(MEASURING), *scripts]
    environment = {**os.environ, "PATH": str(tmp_path)}  # no nvidia-smi, so that nothing is measured where there is one
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
