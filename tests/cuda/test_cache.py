"""The cubin cache: what it loads, what it refuses and rebuilds, and what happens when disk and processes misbehave."""

import fcntl
import hashlib
import logging
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from vllm_exl3.cuda.cache import CubinCache, default_folder

KEY = "ab" * 32
IMAGE = b"\x7fELF machine code" * 100


def _refuse() -> bytes:
    raise AssertionError("built although it was cached")


def _path(cache: CubinCache) -> Path:
    return cache.folder / f"{KEY}.cubin"


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    filled = CubinCache(tmp_path / "cubins")
    assert filled.get(KEY, "kernel", lambda: IMAGE) == (IMAGE, False)
    return filled


def test_second_time_comes_from_disk(cache: CubinCache) -> None:
    assert cache.get(KEY, "kernel", _refuse) == (IMAGE, True)
    assert CubinCache(cache.folder).get(KEY, "kernel", _refuse) == (IMAGE, True)
    assert _path(cache).stat().st_mode & 0o077 == 0
    assert not list(cache.folder.glob(".new-*"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "magic"])
def test_corrupt_files_are_rebuilt_and_said_once(
    cache: CubinCache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(_path(cache).read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "truncate":
        del data[-7:]
    elif damage == "empty":
        data.clear()
    else:
        data[0] ^= 1
    _path(cache).write_bytes(data)
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        assert cache.get(KEY, "kernel", lambda: IMAGE) == (IMAGE, False)
        _path(cache).write_bytes(data)
        cache.get(KEY, "kernel", lambda: IMAGE)
    assert sum("hash" in record.message for record in caplog.records) == 1
    assert cache.get(KEY, "kernel", _refuse) == (IMAGE, True)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_files_that_others_can_write_are_not_loaded(cache: CubinCache, mode: int) -> None:
    _path(cache).chmod(mode)
    assert cache.get(KEY, "kernel", lambda: b"fresh") == (b"fresh", False)
    assert cache.get(KEY, "kernel", _refuse) == (b"fresh", True)


def test_folders_that_others_can_write_are_not_trusted_and_named_once(
    cache: CubinCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.get("cd" * 32, "other", lambda: IMAGE)
    cache.folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        for key in (KEY, "cd" * 32):
            assert cache.get(key, "kernel", lambda: b"fresh") == (b"fresh", False)
    assert [f"{cache.folder}: no cached kernel" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_loaded(cache: CubinCache) -> None:
    os.chown(_path(cache), 12345, -1)
    assert cache.get(KEY, "kernel", lambda: b"fresh") == (b"fresh", False)


def test_links_are_not_followed(cache: CubinCache, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    _path(cache).rename(target)
    _path(cache).symlink_to(target)
    assert cache.get(KEY, "kernel", lambda: b"fresh") == (b"fresh", False)
    assert hashlib.sha256(target.read_bytes()[-len(IMAGE) :]).digest() == hashlib.sha256(IMAGE).digest()


def test_what_is_no_file_costs_that_kernel_only(cache: CubinCache, caplog: pytest.LogCaptureFixture) -> None:
    open_before = os.listdir("/proc/self/fd")
    for key, make in (("cd" * 32, Path.mkdir), ("ef" * 32, os.mkfifo)):
        make(cache.folder / f"{key}.cubin")
        with caplog.at_level(logging.WARNING, "vllm.exl3"):
            for _ in range(2):
                assert cache.get(key, "kernel", lambda: IMAGE)[0] == IMAGE
        told = [record.getMessage() for record in caplog.records if f"{key}.cubin: the cached kernel" in record.message]
        assert len(told) == 1, told
    assert cache.get("ef" * 32, "kernel", _refuse) == (IMAGE, True)  # a file took the pipe's place
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


def test_locks_make_nothing_where_links_lead(cache: CubinCache, tmp_path: Path) -> None:
    (cache.folder / f"{'cd' * 32}.lock").symlink_to(tmp_path / "elsewhere")
    assert cache.get("cd" * 32, "kernel", lambda: IMAGE) == (IMAGE, False)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_vanishes_costs_the_cache_only(
    cache: CubinCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody clears the cache between the opening of a kernel and the look at its folder."""
    stat = os.stat

    def vanished(path: object, **options: object) -> os.stat_result:
        if path == cache.folder:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, **options)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", vanished)
        assert cache.get(KEY, "kernel", lambda: b"fresh") == (b"fresh", False)


def test_a_full_disk_costs_the_cache_only(
    cache: CubinCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "vllm.exl3"):
        assert cache.get("cd" * 32, "other", lambda: b"x") == (b"x", False)
        assert cache.get("ef" * 32, "third", lambda: b"y") == (b"y", False)
    assert sum("No space" in record.message for record in caplog.records) == 1
    assert not list(cache.folder.glob(".new-*"))


def test_an_unusable_folder_costs_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    broken = CubinCache(tmp_path / "file" / "cubins")
    assert broken.get(KEY, "kernel", lambda: IMAGE) == (IMAGE, False)


def _racer(folder: Path, builds: Path, barrier: object) -> None:
    def build() -> bytes:
        with builds.open("a") as file:
            file.write("x")
        return IMAGE

    barrier.wait(60)  # type: ignore[attr-defined]
    assert CubinCache(folder).get(KEY, "kernel", build)[0] == IMAGE


def test_processes_build_once_between_them(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(6)
    # Daemons, since the end of the tests would wait for others without a limit.
    processes = [
        context.Process(target=_racer, args=(tmp_path / "cubins", tmp_path / "builds", barrier), daemon=True)
        for _ in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [0] * 6
    assert (tmp_path / "builds").read_text() == "x"


def test_a_process_that_waits_for_another_says_so_once(cache: CubinCache, caplog: pytest.LogCaptureFixture) -> None:
    """The other one may have been stopped in the middle, and then nothing else would tell where the time goes."""
    keys = ("cd" * 32, "ef" * 32)
    held = [os.open(cache.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT) for key in keys]
    for descriptor in held:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    with caplog.at_level(logging.INFO, "vllm.exl3"), ThreadPoolExecutor(2) as pool:
        found = [pool.submit(cache.get, key, "kernel", lambda: IMAGE) for key in keys]
        wait(found, 1)
        told = [record.getMessage() for record in caplog.records if "another process" in record.message]
        running = [future.running() for future in found]
        for descriptor in held:
            os.close(descriptor)
        assert [future.result() for future in found] == [(IMAGE, False)] * 2
    assert running == [True, True]
    assert len(told) == 1 and str(cache.folder) in told[0]


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(cache: CubinCache) -> None:
    children: list[int] = []

    def build() -> bytes:
        children.append(os.fork())
        if children[0] == 0:
            time.sleep(60)
            os._exit(0)
        return IMAGE

    cache.get("cd" * 32, "kernel", build)
    descriptor = os.open(cache.folder / f"{'cd' * 32}.lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "vllm_exl3" / "cubins"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "vllm_exl3" / "cubins"


def test_a_user_without_a_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
    assert default_folder().parts[-2:] == ("vllm_exl3", "cubins")
