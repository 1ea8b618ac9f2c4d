"""Processes of a server that are killed or stopped: nothing is left running, and no client waits for ever."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving.test_server import MODEL, start
from vllm_exl3.demo.server import Server

pytestmark = pytest.mark.slow

SECONDS = 120


def core_of(parent: psutil.Process) -> psutil.Process:
    """The engine's process, once it is there."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for child in parent.children(recursive=True):
            if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name():
                return child
        time.sleep(0.05)
    raise AssertionError(f"no engine among {[child.name() for child in parent.children(recursive=True)]}")


class Client(threading.Thread):
    """One long answer, and how it ended."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._url = f"http://127.0.0.1:{server.port}/v1/completions"
        self.began, self.ended = threading.Event(), ""

    def run(self) -> None:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 240, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", self._url, json=body, timeout=SECONDS) as response:
                for line in response.iter_lines():
                    self.began.set()
                    self.ended = line or self.ended
        except httpx.HTTPError as error:
            self.ended = type(error).__name__


def expect_all_gone(parent: psutil.Process, children: list[psutil.Process]) -> None:
    """Nothing is left; the exit status is vLLM's own, 0 even where its engine was killed."""
    _, alive = psutil.wait_procs([parent, *children], timeout=SECONDS)
    assert not alive, [process.cmdline() for process in alive]


def while_loading(server: Server) -> None:
    """Once the engine's process is there, it imports and loads for seconds."""
    assert server._process is not None
    core_of(psutil.Process(server._process.pid))


def under_load(server: Server) -> None:
    server.wait_healthy(240)


@pytest.mark.parametrize("when", [while_loading, under_load], ids=lambda when: when.__name__)
@pytest.mark.parametrize("whom", ["engine core", "API server"])
def test_a_killed_process_ends_the_others(tmp_path: Path, when: Callable[[Server], None], whom: str) -> None:
    with start(tmp_path) as server:
        when(server)
        assert server._process is not None
        parent = psutil.Process(server._process.pid)
        children, core = parent.children(recursive=True), core_of(parent)
        client = Client(server)
        if when is under_load:
            client.start()
            assert client.began.wait(SECONDS)
        (core if whom == "engine core" else parent).send_signal(signal.SIGKILL)
        expect_all_gone(parent, [*children, core])
        if when is under_load:
            client.join(SECONDS)
            assert not client.is_alive() and client.ended and client.ended != "data: [DONE]"


def test_an_engine_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.wait_healthy(240)
        assert server._process is not None
        core = core_of(psutil.Process(server._process.pid))
        client = Client(server)
        client.start()
        assert client.began.wait(SECONDS)
        core.send_signal(signal.SIGSTOP)
        time.sleep(5)
        assert client.is_alive(), "the answer was there before the engine could be stopped"
        core.send_signal(signal.SIGCONT)
        client.join(SECONDS)
        assert client.ended == "data: [DONE]"
