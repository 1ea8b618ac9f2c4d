"""Processes: forking and killing them, and what becomes of an engine when one of its own is killed."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess as Job
from pathlib import Path
from typing import Any

__all__ = ["Job", "children_of", "fork", "gpu_memory_mib", "kill", "kill_a_rank"]

Row = dict[str, Any]

_GRACE = 3
"""Seconds in which the last processes of an engine that ended may go."""


def fork(log: Path, environment: dict[str, str], work: Callable[[], None]) -> Job:
    """Run something in a copy of this process with its own session; what it prints goes into a file."""

    def child() -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = log.open("w", encoding="utf-8", buffering=1)
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        sys.stdout = sys.stderr = file  # where these were something else, as under pytest
        os.environ.update(environment)
        work()

    job = multiprocessing.get_context("fork").Process(target=child, name=log.stem)
    job.start()
    return job


def kill(job: Job) -> None:
    """End a process and whatever it started."""
    assert job.pid is not None
    family = children_of(job.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.kill()
    job.join()


def kill_a_rank(victim: Job, log: Path, patience: float, after: float = 2.0) -> Row:
    """Kill the second worker of an engine in the middle of a request, and see how the engine ends.

    Args:
        victim: the process that made the engine and exits with 3 once it is told that it is dead.
        log: what the process and its workers print.
        patience: seconds to wait for the end.
        after: seconds until then, so that a request is under way.

    Returns:
        A row: ``ok`` where it ended so, with a message that names the worker, and left no process behind.
    """
    row: Row = {"kernel": "native", "subject": "killed rank", "mode": "tp2"}
    time.sleep(after)
    assert victim.pid is not None
    family = children_of(victim.pid)
    workers = [pid for pid in family if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    if len(workers) < 2:
        return {**row, "ok": False, "found": f"{len(workers)} workers among {len(family)} processes"}
    os.kill(workers[-1], signal.SIGKILL)
    begin = time.monotonic()
    victim.join(patience)
    if victim.is_alive():
        return {**row, "ok": False, "found": "the engine goes on"}
    took = time.monotonic() - begin
    left = family
    while left and time.monotonic() - begin < took + _GRACE:
        time.sleep(0.1)
        left = [pid for pid in family if not _is_gone(pid)]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if "died unexpectedly" in line] + [line for line in lines if "ENDED" in line]
    ok = victim.exitcode == 3 and len(said) > 1 and not left
    return {**row, "ok": ok, "seconds": round(took, 1), "left": left, "messages": [line[-200:] for line in said]}


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children_of(pid: int) -> list[int]:
    """Every process that descends from one, in the order in which they were started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, ahead = [], [pid]
    while ahead:
        children = [child for child, parent in parents.items() if parent == ahead[0]]
        ahead = [*ahead[1:], *children]
        found += children
    return sorted(found)


def gpu_memory_mib() -> list[int]:
    """Used memory of every GPU, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]
