"""Builds a row of `gpu_rows` by `tests.families.built`, in a process of its own and a release that has its class."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.vllm_tree import make_tree

__all__ = ["build_apart"]

ROOT = Path(__file__).parents[2]
_LATER = {"flint": "0.33.0"}
"""Rows whose class only a later release has."""

_SECONDS = 300


def build_apart(name: str) -> dict[str, Any]:
    """What loading this row's pack and its twin gave.

    Args:
        name: of the row.

    Returns:
        ``name``, ``vllm`` and either ``exl3``, ``experts`` and ``parameters`` that were compared and where they
        ``differ``, or ``fault``.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    release = version("vllm").partition("+")[0]
    if name in _LATER and release != _LATER[name]:
        release = _LATER[name]
        paths.insert(0, str(make_tree(release)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "tests.families.built", name]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    match = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    found = json.loads(match[1]) if match else {"name": name, "fault": (done.stdout + done.stderr)[-600:]}
    return {**found, "vllm": release}
