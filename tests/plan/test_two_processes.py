"""Forking, killing and judging engines, by stand-ins for them: ``benchmarks/gpu_two.py`` relies on it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.two_processes import Job, children_of, fork, kill, kill_a_rank


def sleepers(count: int) -> list[subprocess.Popen[bytes]]:
    """Processes that look like workers of an engine."""
    return [subprocess.Popen(["bash", "-c", "exec -a Worker_TP sleep 60"]) for _ in range(count)]


def test_a_fork_logs_and_leaves_nothing_when_it_is_killed(tmp_path: Path) -> None:
    def work() -> None:
        print("hello", os.environ["COLOUR"], flush=True)
        sleepers(2)
        time.sleep(60)

    job = fork(tmp_path / "job.log", {"COLOUR": "red"}, work)
    family = workers_of(job)
    kill(job)
    assert job.exitcode is not None
    deadline = time.monotonic() + 10
    while any(map(running, family)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, family))
    assert (tmp_path / "job.log").read_text() == "hello red\n"
    assert "COLOUR" not in os.environ


def workers_of(job: Job) -> list[int]:
    """Its workers, once there are two."""
    deadline = time.monotonic() + 20
    while sum(map(running, family := children_of(job.pid))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return family


def running(pid: int) -> bool:
    try:
        return b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("says", "ends_others", "status", "ok"),
    [(True, True, 3, True), (False, True, 3, False), (True, False, 3, False), (True, True, 1, False)],
)
def test_an_engine_must_say_end_and_clean_up(
    tmp_path: Path, says: bool, ends_others: bool, status: int, ok: bool
) -> None:
    log = tmp_path / "victim.log"

    def engine() -> None:
        workers = sleepers(2)
        workers[1].wait()
        if says:
            print("Worker proc 1 died unexpectedly\nENDED EngineDeadError: it is dead", flush=True)
        if ends_others:
            workers[0].kill()
            workers[0].wait()
        sys.exit(status)

    victim = fork(log, {}, engine)
    workers_of(victim)
    row = kill_a_rank(victim, log, 20, after=0)
    for pid in row["left"]:
        os.kill(pid, 9)
    assert row["ok"] is ok, row


def test_an_engine_that_goes_on_is_not_well(tmp_path: Path) -> None:
    def engine() -> None:
        sleepers(2)
        time.sleep(60)

    victim = fork(tmp_path / "victim.log", {}, engine)
    workers_of(victim)
    row = kill_a_rank(victim, tmp_path / "victim.log", 0.5, after=0)
    kill(victim)
    assert (row["ok"], row["found"]) == (False, "the engine goes on")
