"""The demo's server supervisor: whatever happens, nothing that it started keeps running."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")

from vllm_exl3.demo.server import Server, ServerError, choose_port  # noqa: E402

TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
children = [
    subprocess.Popen([sys.executable, "-c", stubborn]),
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True),
]
print("pids", os.getpid(), *(child.pid for child in children), flush=True)
time.sleep(600)
"""
"""A server that ignores SIGTERM, with a child in its group and one that left it."""

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

PARENT = """
import os, sys, time
from pathlib import Path
import vllm_exl3.demo.server
from vllm_exl3.demo.server import Server, signals_as_exit
vllm_exl3.demo.server.PATIENCE = (0.3, 5.0, 10.0)
command = [sys.executable, "-c", sys.argv[2]]
with signals_as_exit(), Server(command, port=1, log=Path(sys.argv[1]), environment=os.environ) as server:
    while server.log_text().count(" ") < 3:
        time.sleep(0.02)
    server.survivors()
    print("ready", flush=True)
    time.sleep(600)
"""


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(log: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        words = log.read_text().split() if log.exists() else []
        if words[:1] == ["pids"] and len(words) == 4:
            return [int(word) for word in words[1:]]
        time.sleep(0.02)
    raise AssertionError("the tree did not start")


def tree(log: Path) -> Server:
    return Server([sys.executable, "-c", TREE], port=1, log=log, environment=os.environ)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_exl3.demo.server.PATIENCE", (0.3, 0.3, 10.0))


def test_an_exception_ends_the_whole_tree(tmp_path: Path) -> None:
    with pytest.raises(KeyError), tree(tmp_path / "log"):
        started = pids(tmp_path / "log")
        assert all(running(pid) for pid in started)
        raise KeyError
    assert not any(running(pid) for pid in started)


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    with tree(tmp_path / "log") as server:
        started = pids(tmp_path / "log")
        server.stop()
        assert not any(running(pid) for pid in started)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_ends_the_whole_tree(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    obedient = TREE.replace("signal.SIG_IGN", "signal.SIG_DFL")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log), obedient], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        started = pids(log)
        parent.send_signal(number)
        assert parent.wait(30) != 0
        assert not any(running(pid) for pid in started)
    finally:
        parent.terminate()
        parent.wait(30)


def test_health_is_waited_for(tmp_path: Path) -> None:
    port = choose_port()
    command = [sys.executable, "-c", HEALTHY, str(port)]
    with Server(command, port=port, log=tmp_path / "log", environment=os.environ) as server:
        server.wait_healthy(60)


def test_a_server_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such pack'); sys.exit(3)"]
    server = Server(command, port=choose_port(), log=tmp_path / "log", environment=os.environ)
    with server, pytest.raises(ServerError, match=r"status 3[\s\S]*no such pack"):
        server.wait_healthy(60)


def test_a_server_that_hangs_is_reported(tmp_path: Path) -> None:
    with tree(tmp_path / "log") as server, pytest.raises(ServerError, match="not healthy after 1 s"):
        server.wait_healthy(1)


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert choose_port(port) not in (port, 0)
    free = choose_port()
    assert choose_port(free) == free


def test_a_server_starts_on_the_processors_that_it_is_given(tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", "import os; print('on', os.sched_getaffinity(0), flush=True)"]
    log = tmp_path / "log"
    with Server(command, port=1, log=log, environment=os.environ, processors={one}) as server:
        deadline = time.monotonic() + 20
        while "on" not in server.log_text() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert log.read_text().strip() == f"on {{{one}}}"
