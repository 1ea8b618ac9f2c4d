"""The folder of compiled kernels on disks that are full, read-only or changed by others, and eight servers at once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_exl3.cuda.cache import CubinCache

KEY = "cd" * 32
IMAGE = bytes(range(256)) * 40

SERVER = """
import sys
from pathlib import Path
from vllm_exl3.cuda.cache import CubinCache
folder, builds, name = map(str, sys.argv[1:])
def build(number):
    with open(builds, "a") as file:
        file.write(f"{number}\\n")
    return bytes(range(256)) * 40
cache = CubinCache(Path(folder))
images = [cache.get(f"{number:064x}", "kernel", lambda: build(number)) for number in range(12)]
assert all(image == bytes(range(256)) * 40 for image, _ in images) and cache.unkept == 0
"""


def refuse() -> bytes:
    raise AssertionError("built although it was cached")


def test_eight_servers_on_one_cold_folder_build_each_kernel_once(tmp_path: Path) -> None:
    """Started as servers are, not forked; as another worker's start may be killed, two more come later."""
    builds = tmp_path / "builds"
    command = [sys.executable, "-c", SERVER, str(tmp_path / "cubins"), str(builds)]
    servers = [subprocess.Popen([*command, str(number)]) for number in range(8)]
    servers[0].kill()
    assert [server.wait(120) for server in servers[1:]] == [0] * 7
    servers[0].wait()
    built = builds.read_text().split()
    # The one that was killed may have built one that it had not stored yet.
    assert {int(number) for number in built} == set(range(12)) and len(built) <= 13
    files = sorted((tmp_path / "cubins").glob("*.cubin"))
    assert len(files) == 12
    assert subprocess.run([*command, "later"], check=False).returncode == 0
    assert builds.read_text().split() == built


def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.get(KEY, "kernel", lambda: IMAGE)
    (file,) = (tmp_path / "cubins").glob("*.cubin")
    whole = file.read_bytes()
    for place in (*range(0, 60), *range(60, len(whole), 997), len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert cache.get(KEY, "kernel", lambda: IMAGE) == (IMAGE, False), place
    for size in (*range(0, 60), len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert cache.get(KEY, "kernel", lambda: IMAGE) == (IMAGE, False), size
    assert cache.get(KEY, "kernel", refuse) == (IMAGE, True)


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.get(KEY, "kernel", lambda: IMAGE)
    for path in (*(tmp_path / "cubins").iterdir(), tmp_path / "cubins"):
        for moment in (0, 4e9):
            os.utime(path, (moment, moment))
            assert cache.get(KEY, "kernel", refuse) == (IMAGE, True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_the_cache_and_leaves_no_part(small_disk: Path) -> None:
    cache = CubinCache(small_disk / "cubins")
    images = [cache.get(f"{number:064x}", "kernel", lambda: IMAGE) for number in range(16)]
    assert all(image == IMAGE for image, _ in images) and cache.unkept > 0
    kept = list((small_disk / "cubins").glob("*.cubin"))
    assert kept and not list((small_disk / "cubins").glob(".new-*"))
    assert all(cache.get(file.stem, "kernel", refuse) == (IMAGE, True) for file in kept)


def test_a_read_only_disk_costs_the_cache_only(small_disk: Path) -> None:
    cache = CubinCache(small_disk / "cubins")
    cache.get(KEY, "kernel", lambda: IMAGE)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert cache.get(KEY, "kernel", refuse) == (IMAGE, True)
    assert cache.get("ef" * 32, "kernel", lambda: IMAGE) == (IMAGE, False)
    assert "cannot be written" in (cache.refusal() or "")
