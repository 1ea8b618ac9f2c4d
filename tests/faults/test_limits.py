"""`vllm serve` on a CPU where memory, address space or /dev/shm run out, or its API server is killed: it serves or
ends in words, and leaves no process and no shared memory behind. Its /dev/shm is a file system of its own.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving.test_server import MODEL, start
from vllm_exl3.demo.server import Server, ServerError

pytestmark = pytest.mark.slow

SECONDS = 240
PATIENCE = 120
GIB = 1 << 30
CGROUPS = Path("/sys/fs/cgroup/memory")
LIMITED = "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_AS, (n, n)); "
LIMITED += "os.execvp(sys.argv[2], sys.argv[2:])"
BOUND = 'mount --bind "$1" /dev/shm && shift && exec "$@"'
JOINED = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


class Shm:
    """A file system for /dev/shm of one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def mount(self, size: str) -> None:
        """Of so many bytes, as mount takes it."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(self.folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")

    def server(self, folder: Path, *options: str, prefix: tuple[str, ...] = ()) -> Server:
        """A server that sees it, started through a prefix of the command."""
        server = start(folder, *options)
        server._environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|0" if "2" in options else "auto"
        bound = ["unshare", "--mount", "sh", "-c", BOUND, "sh", str(self.folder)]
        server._command = [*bound, *prefix, *server._command]
        return server

    def left(self) -> list[str]:
        """Files that are there still; what the resource tracker of a killed process has yet to remove goes first."""
        deadline = time.monotonic() + 10
        while any(self.folder.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Shm]:
    made = Shm(tmp_path / "shm")
    yield made
    subprocess.run(["umount", str(made.folder)], check=False, capture_output=True)


def expect_an_end(server: Server, *words: str) -> str:
    """The server ends by itself; its log, which has one of the words."""
    with pytest.raises(ServerError, match="exited with status"):
        server.wait_healthy(SECONDS)
    expect_nothing_running(server)
    text = server.log_text()
    assert any(word in text for word in words), server.last_words(40)
    return text


def expect_nothing_running(server: Server) -> None:
    """A core whose parent died while it imported ends once it has."""
    deadline = time.monotonic() + PATIENCE
    while server.survivors() and time.monotonic() < deadline:
        time.sleep(0.1)
    server._remember_children()
    assert not server.survivors(), [process.cmdline() for process in server.survivors()]


def answer(server: Server) -> str:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("gibibytes", [1, 2, 4])
def test_a_small_address_space_ends_the_start(gibibytes: int, tmp_path: Path, shm: Shm) -> None:
    shm.mount("256m")
    with shm.server(tmp_path, prefix=(sys.executable, "-c", LIMITED, str(gibibytes * GIB))) as server:
        expect_an_end(server, "memory", "Memory", "allocate", "failed to map segment", "can't start new thread")
    assert shm.left() == []


@pytest.fixture
def cgroup(tmp_path: Path) -> Iterator[Path]:
    folder = CGROUPS / f"vllm_exl3_{tmp_path.parent.name}_{tmp_path.name}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs a memory cgroup that can be written")
    yield folder
    for _ in range(50):  # until the kernel has taken note of the last process
        try:
            folder.rmdir()
            break
        except OSError:
            time.sleep(0.1)


def test_the_kernel_ends_a_process_that_outgrows_its_cgroup(tmp_path: Path, shm: Shm, cgroup: Path) -> None:
    """Whichever it takes, the others end too, and the log says which process died."""
    shm.mount("256m")
    (cgroup / "memory.limit_in_bytes").write_text(str(600 << 20))
    with shm.server(tmp_path, prefix=("sh", "-c", JOINED, "sh", str(cgroup))) as server:
        with pytest.raises(ServerError, match="exited with status"):
            server.wait_healthy(SECONDS)
        expect_nothing_running(server)
    assert int((cgroup / "memory.max_usage_in_bytes").read_text()) > 500 << 20
    assert (cgroup / "cgroup.procs").read_text() == ""
    assert shm.left() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_dev_shm_of_256_mib_is_enough(ranks: int, tmp_path: Path, shm: Shm) -> None:
    shm.mount("256m")
    with shm.server(tmp_path, "--tensor-parallel-size", str(ranks)) as server:
        server.wait_healthy(SECONDS)
        assert answer(server) == answer(server)
        server.stop()
    # vLLM 0.32 itself leaves what ranks on a CPU exchange activations by.
    left = [name for name in shm.left() if not (name.startswith("vllm_dist_") and "cpushm" in name)]
    assert left == []


@pytest.mark.parametrize(("size", "ranks"), [("64m", 1), ("64m", 2), ("64k", 1)])
def test_a_smaller_dev_shm_ends_the_start_in_words(size: str, ranks: int, tmp_path: Path, shm: Shm) -> None:
    """vLLM asks for 160 MiB of it: 64 MiB is what containers have by default."""
    shm.mount(size)
    with shm.server(tmp_path, "--tensor-parallel-size", str(ranks)) as server:
        expect_an_end(server, "Insufficient space in /dev/shm")
    assert shm.left() == []


def test_a_killed_api_server_leaves_nothing_and_the_next_one_starts(tmp_path: Path, shm: Shm) -> None:
    shm.mount("256m")
    with shm.server(tmp_path) as server:
        server.wait_healthy(SECONDS)
        assert server._process is not None
        expected, parent = answer(server), psutil.Process(server._process.pid)
        family = [parent, *parent.children(recursive=True)]
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 240, "ignore_eos": True}
        ends: list[str] = []

        def ask() -> None:
            try:
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS)
                ends.append("answered")
            except httpx.HTTPError as error:
                ends.append(type(error).__name__)

        client = threading.Thread(target=ask)
        client.start()
        time.sleep(0.3)
        parent.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not alive, [process.cmdline() for process in alive]
        client.join(SECONDS)
        assert ends and ends != ["answered"]
    assert shm.left() == []
    with shm.server(tmp_path) as server:
        server.wait_healthy(SECONDS)
        assert answer(server) == expected
