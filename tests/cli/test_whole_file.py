"""Files that are written whole: where a path is a link, a device, a pipe, or cannot be written."""

import os
import threading
from pathlib import Path

import pytest

from vllm_exl3.tools.whole_file import check_target, whole_file


def _write(path: Path, text: str = "whole") -> None:
    check_target(path)
    with whole_file(path) as partial:
        partial.write_text(text)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("before")
    link.symlink_to(target.name)
    _write(link)
    assert link.is_symlink() and target.read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "target.json"]


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/fd/1"])
def test_a_device_is_written_to_and_not_replaced(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = os.lstat(path)
    _write(Path(path))
    assert (os.lstat(path).st_mode, os.lstat(path).st_ino) == (before.st_mode, before.st_ino)
    assert capfd.readouterr().out == ("" if path == "/dev/null" else "whole")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    _write(pipe)
    reader.join(10)
    assert found == ["whole"] and pipe.is_fifo()


def test_the_longest_name_that_a_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 125 + ".json")
    _write(path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda folder: folder, IsADirectoryError, ""),
        (lambda folder: (folder / "file").touch() or folder / "file" / "x.json", NotADirectoryError, "file"),
        (lambda folder: Path("/proc/no/x.json"), OSError, "/proc"),
    ],
)
def test_what_cannot_be_written_is_found_before_it_is(tmp_path: Path, make, error, named: str) -> None:  # type: ignore[no-untyped-def]
    path = make(tmp_path)
    with pytest.raises(error) as found:
        check_target(path)
    assert found.value.filename.endswith(named)


def test_errors_name_the_file_and_not_the_hidden_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found, whole_file(tmp_path / "none" / "x.json") as partial:
        partial.write_text("half")
    assert found.value.filename == str(tmp_path / "none" / "x.json")
