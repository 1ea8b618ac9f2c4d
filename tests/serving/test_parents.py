"""An engine core whose API server was killed ends; other processes are left alone."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vllm_exl3.serving.config import Exl3Config

PARENT = """
import multiprocessing, os, signal, sys, threading, time
name = sys.argv[1]
from vllm_exl3.serving import parents

def core():
    parents.GRACE = parents.INTERVAL = 0.2
    if sys.argv[2] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()
    if sys.argv[2] == "late":  # as while it unpickles
        multiprocessing.process._parent_process = None
        print(os.getpid(), flush=True)
        while os.getppid() == parent:
            time.sleep(0.05)
    parents.end_with_parent(parent)
    parents.end_with_parent(1)
    assert threading.active_count() == 1 + name.startswith("EngineCore")
    print(os.getpid(), flush=True)
    time.sleep(60)

child = multiprocessing.get_context("fork").Process(target=core, name=sys.argv[1])
if __name__ == "__main__":
    child.start()
    time.sleep(60)
"""


def test_a_config_names_the_process_that_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    senders: list[int | None] = []
    monkeypatch.setattr("vllm_exl3.serving.config.end_with_parent", senders.append)
    pickle.loads(pickle.dumps(Exl3Config.from_config({"quant_method": "exl3", "bits": 4.0})))
    assert senders == [os.getpid()]


def kill_parent(name: str, hearing: str) -> psutil.Process:
    """The child of a process that was killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, name, hearing], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    return child


@pytest.mark.parametrize(
    ("name", "hearing"), [("EngineCore", "hears"), ("EngineCore_DP1", "deaf"), ("EngineCore", "late")]
)
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


SERVED_BY_A_FORK_SERVER = """
import multiprocessing, os, sys, time

def core():
    from vllm_exl3.serving import parents
    parents.GRACE = parents.INTERVAL = 0.2
    parents.end_with_parent()
    assert os.getppid() != multiprocessing.parent_process().pid
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    child = multiprocessing.get_context("forkserver").Process(target=core, name="EngineCore")
    child.start()
    time.sleep(60)
"""


def test_an_engine_of_a_fork_server_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    script = tmp_path / "served.py"
    script.write_text(SERVED_BY_A_FORK_SERVER)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        assert psutil.wait_procs([child], timeout=1)[1] == [child], "its parent is the fork server"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert psutil.wait_procs([child], timeout=20)[1] == []
    finally:
        if child.is_running():
            child.kill()
