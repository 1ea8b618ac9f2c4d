"""Processes of an engine: whose they are, what becomes of them when one is killed, what they leave on GPUs."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["children_of", "gpu_memory_mib", "kill_a_rank"]

Row = dict[str, Any]


def kill_a_rank(victim: "subprocess.Popen[bytes]", log: Path, patience: float) -> Row:
    """Kill the second worker of an engine in the middle of a request, and see how the engine ends.

    Args:
        victim: the process that made the engine and exits with 3 once it is told that it is dead.
        log: what the process and its workers print.
        patience: seconds to wait for the end, within 5 and 60.

    Returns:
        A row: ``ok`` where it ended so, with a message that names the worker, and left no process behind.
    """
    row: Row = {"kernel": "native", "subject": "killed rank", "mode": "tp2"}
    time.sleep(2)  # in the middle of a request
    family = children_of(victim.pid)
    workers = [pid for pid in family if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    if len(workers) < 2:
        return {**row, "ok": False, "found": f"{len(workers)} workers among {len(family)} processes"}
    os.kill(workers[-1], signal.SIGKILL)
    begin = time.monotonic()
    try:
        status = victim.wait(timeout=max(5.0, min(60.0, patience)))
    except subprocess.TimeoutExpired:
        return {**row, "ok": False, "found": "the engine goes on"}
    took = time.monotonic() - begin
    time.sleep(1)
    left = [pid for pid in family if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if "died unexpectedly" in line] + [line for line in lines if "ENDED" in line]
    ok = status == 3 and len(said) > 1 and not left
    return {**row, "ok": ok, "seconds": round(took, 1), "left": len(left), "messages": [line[-200:] for line in said]}


def _is_zombie(pid: int) -> bool:
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
