#!/usr/bin/env python3
"""Serving beside another process: tokens a second of the demo's pack, alone and with one processor taken.

    python benchmarks/cpu_busy.py [--cache FOLDER] [--questions 6] [--write]

Each way of waiting serves in turn, in a server of its own as the demo starts it. The competitor is a loop without
pause that this program starts and ends. A row says how many processors anything but the server and the competitor kept
busy: where that is not near 0, the machine had other work, which the numbers then include.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_exl3.cli.demo import default_cache
from vllm_exl3.cpu.library import library
from vllm_exl3.demo.chat import ask
from vllm_exl3.demo.display import Display
from vllm_exl3.demo.prepare import Workshop
from vllm_exl3.demo.run import SERVED_NAME, START_SECONDS, serve_command, server_environment
from vllm_exl3.demo.server import Server, choose_port, signals_as_exit
from vllm_exl3.processors import SPINS, busy_by_others
from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_busy.json"

WAITS: dict[str, dict[str, str]] = {
    "OpenMP's default": {},
    f"GOMP_SPINCOUNT={SPINS}, as the demo": {"GOMP_SPINCOUNT": SPINS},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}
"""Ways in which OpenMP's threads wait for work."""

ALL, CHOSEN = "one for each processor", "vLLM's choice"
THREADS = {ALL: {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, CHOSEN: {}}
"""vLLM leaves one processor to its scheduler: of two, one is left for the model, whose thread waits for no other."""

_DEFAULT, *_OTHERS = WAITS
CASES = [(ALL, _DEFAULT), (ALL, _OTHERS[0]), (CHOSEN, _DEFAULT), *((ALL, wait) for wait in _OTHERS[1:])]
"""The ones that matter most come first; each is written as soon as it is measured."""

QUESTION = "Explain in one sentence why plants need sunlight."


@contextlib.contextmanager
def competitor() -> Iterator[None]:
    """A process that keeps one processor busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def speeds(server: Server, questions: int) -> dict[str, Any]:
    """Tokens a second of each answer, and what else ran."""
    start, before = time.monotonic(), busy_by_others()
    rates = [ask(server.url, SERVED_NAME, QUESTION, max_tokens=64).tokens_per_second or 0.0 for _ in range(questions)]
    after = busy_by_others()
    others = None if before is None or after is None else round((after - before) / (time.monotonic() - start), 2)
    return {"median": statistics.median(rates), "most": max(rates), "others": others}


def measure(pack: Path, log: Path, threads: str, wait: str, questions: int) -> list[dict[str, Any]]:
    """Both rows of one way of waiting."""
    port = choose_port()
    rows = []
    with server_environment() as environment:
        for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "VLLM_CPU_NUM_OF_RESERVED_CPU"):
            environment.pop(variable, None)
        environment |= {**THREADS[threads], **WAITS[wait]}
        with Server(serve_command(pack, port), port=port, log=log, environment=environment) as server:
            server.wait_healthy(START_SECONDS)
            ask(server.url, SERVED_NAME, QUESTION, max_tokens=16)
            for busy in (False, True):
                with competitor() if busy else contextlib.nullcontext():
                    found = speeds(server, questions)
                row = {"kernel": "native", "subject": "busy", "threads": threads, "waiting": wait, "competitor": busy}
                row |= {"tokens_per_second": round(found["median"], 2), "most": round(found["most"], 2)}
                rows.append(row | {"processors_busy_by_others": found["others"]})
                print(f"{threads:24s} {wait:36s} {'one taken' if busy else 'alone':10s} {found}", flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases to measure")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    pack = Workshop(arguments.cache, Display(Console())).pack()
    facts = {"isa": library().exl3_isa().decode()}
    with signals_as_exit():
        for threads, wait in CASES[: arguments.cases]:
            rows = measure(pack, arguments.cache / "busy.log", threads, wait, arguments.questions)
            if not arguments.write:
                continue
            write_results(
                RESULTS,
                rows,
                machine="cpu",
                command="python benchmarks/cpu_busy.py --write",
                facts=facts,
                replaces=lambda row, case=(threads, wait): (row["threads"], row["waiting"]) == case,
            )


if __name__ == "__main__":
    main()
