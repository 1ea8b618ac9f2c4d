"""Kernels on the host say what stopped them, and one library's say nothing of another's."""

import ctypes
import shutil
from pathlib import Path

import pytest

from tests.cuda.host_kernels import HostKernels, build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    build("faults", path)
    return path


def _library(folder: Path, copy: Path) -> HostKernels:
    """The library at a path of its own: one that a kernel stopped runs nothing again."""
    shutil.copy(folder / "faults.so", copy)
    return HostKernels(copy)


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    (
        ("read_beyond_shared_memory", (0,), "shared memory access"),
        ("read_beyond_shared_memory", (1,), "shared memory access"),
        ("leave_a_barrier_out", (0,), "threads wait for each other"),
        ("leave_a_barrier_out", (1,), "a thread that others wait for"),
    ),
)
def test_what_stops_a_kernel_is_raised(
    folder: Path, tmp_path: Path, function: str, arguments: tuple[int, ...], why: str
) -> None:
    library = _library(folder, tmp_path / "stopped.so")
    out = (ctypes.c_uint32 * 64)()
    library.run_well(out)
    assert list(out) == list(range(64))
    with pytest.raises(AssertionError, match=f"{function}.*{why}"):
        getattr(library, function)(*arguments)
    with pytest.raises(AssertionError, match=f"ran before: {why}"):
        library.run_well(out)


def test_libraries_share_no_state(folder: Path, tmp_path: Path) -> None:
    """One that makes its launches wait in order once did so for every library loaded after it."""
    strict, other = (_library(folder, tmp_path / name) for name in ("strict.so", "other.so"))
    strict.wait_in_order()
    other.begin_the_next_launch_before_waiting()
    with pytest.raises(AssertionError, match="before this one waited"):
        strict.begin_the_next_launch_before_waiting()
    other.run_well((ctypes.c_uint32 * 64)())
