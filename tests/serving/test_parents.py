"""An engine core whose API server was killed ends; other processes are left alone."""

import signal
import subprocess
import sys

import psutil
import pytest

PARENT = """
import multiprocessing, os, signal, sys, threading, time
name = sys.argv[1]
from vllm_exl3.serving import parents

def core():
    parents.GRACE = parents.INTERVAL = 0.2
    if sys.argv[2] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parents.end_with_parent()
    parents.end_with_parent()
    assert threading.active_count() == 1 + name.startswith("EngineCore")
    print(os.getpid(), flush=True)
    time.sleep(60)

child = multiprocessing.get_context("fork").Process(target=core, name=sys.argv[1])
if __name__ == "__main__":
    child.start()
    time.sleep(60)
"""


def kill_parent(name: str, hearing: str) -> psutil.Process:
    """The child of a process that was killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, name, hearing], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    return child


@pytest.mark.parametrize(("name", "hearing"), [("EngineCore", "hears"), ("EngineCore_DP1", "deaf")])
def test_an_engine_ends_with_its_parent(name: str, hearing: str) -> None:
    child = kill_parent(name, hearing)
    try:
        assert psutil.wait_procs([child], timeout=20)[1] == []
    finally:
        if child.is_running():
            child.kill()


def test_another_process_goes_on() -> None:
    child = kill_parent("Worker", "hears")
    try:
        assert psutil.wait_procs([child], timeout=1)[1] == [child]
    finally:
        child.kill()
