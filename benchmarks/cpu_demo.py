#!/usr/bin/env python3
"""Seconds that the demo takes from its first line to its last, by instruction set, alone and with a processor taken.

    python benchmarks/cpu_demo.py [--write]

Every run has a new cache folder, so it downloads, quantizes and serves. AVX2 is chosen for torch, vLLM and this package
(tests/avx2). The competitor is a loop without pause that this program starts and ends. A row says how many processors
anything but the demo and the competitor kept busy: where that is not near 0, the machine had other work.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu_busy import competitor

from vllm_exl3.processors import busy_by_others
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_demo.json"
AVX2 = Path(__file__).parents[1] / "tests" / "avx2"
SETS = {"AVX2": {"PYTHONPATH": str(AVX2)}, "the processor's own": {}}
QUANTIZED = re.compile(r"took (\d+) s")


def run(name: str, busy: bool) -> dict[str, Any]:
    """One demo from nothing.

    Args:
        name: a key of ``SETS``.
        busy: run the competitor beside it.

    Raises:
        subprocess.CalledProcessError: if the demo found a wrong answer or ended early.
    """
    start, before = time.monotonic(), busy_by_others()
    with tempfile.TemporaryDirectory() as cache, competitor() if busy else contextlib.nullcontext():
        command = [sys.executable, "-m", "vllm_exl3", "demo", "--cache", cache]
        ended = subprocess.run(command, env=os.environ | SETS[name], check=True, capture_output=True, text=True)
        seconds = time.monotonic() - start
    after = busy_by_others()
    quantized = QUANTIZED.search(ended.stdout)
    return {
        "subject": "demo",
        "instructions": name,
        "competitor": busy,
        "seconds": round(seconds, 1),
        "quantization_seconds": int(quantized.group(1)) if quantized else None,
        "processors_busy_by_others": None if before is None or after is None else round((after - before) / seconds, 2),
    }


def main() -> None:
    """Measure, print, and write the results if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    rows = []
    for busy in (False, True):
        for name in SETS:
            rows.append(run(name, busy))
            print(rows[-1], flush=True)
    if arguments.write:
        write_results(RESULTS, rows, machine="cpu", command="python benchmarks/cpu_demo.py --write")


if __name__ == "__main__":
    main()
