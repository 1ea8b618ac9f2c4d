"""Where a pack's files come from: a local folder here, a Hub repository in `hub.py`.

A source lists names and reads ranges; it knows nothing of what the bytes mean.
"""

import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["LocalFolder", "Range", "Source"]

Range = tuple[str, int, int]
"""File name, first byte, number of bytes."""


class Source(Protocol):
    """Read access to the files of one pack at one fixed state.

    Attributes:
        label: what messages call it.
        folder: where the files lie, or None when they are not all local.
        commit: the Hub commit that was resolved, or None.
        remarks: oddities met while opening it, for the findings of `check`.
    """

    label: str
    folder: Path | None
    commit: str | None
    remarks: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """Names of all files at the top level, sorted."""

    def size(self, name: str) -> int:
        """Bytes of one file."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``."""

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Many small ranges, in order."""

    def whole(self, name: str) -> bytes:
        """All bytes of one text file."""

    def branches(self) -> list[str]:
        """Branches to choose from, for messages; empty for a plain folder."""

    def state(self) -> tuple[object, ...]:
        """Equal for two sources exactly if they hold the same files in the same state."""


class LocalFolder:
    """A folder on disk, such as a download or a snapshot of the Hub cache."""

    def __init__(
        self, folder: Path, *, label: str = "", commit: str | None = None, remarks: tuple[str, ...] = ()
    ) -> None:
        self.label = label or str(folder)
        self.folder: Path | None = folder
        self.commit = commit
        self.remarks = remarks
        self._root = folder
        try:
            with os.scandir(folder) as entries:
                self._stat = dict(_files(entries))
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise Exl3PackError(
                found=f"no readable folder ({getattr(error, 'strerror', error)})",
                expected="a folder with config.json and *.safetensors, or a Hub repository id",
                where=str(folder),
                remedy="Check the path; for a Hub repository write owner/name.",
            ) from error

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn the system's refusal to read one file into the error that names the pack."""
        try:
            yield
        except OSError as error:
            raise Exl3PackError(
                found=f"a file that cannot be read ({error.strerror})",
                expected="a readable file",
                where=f"{name} in {self.label}",
                remedy="Check its permissions, and where a link leads; if it was replaced meanwhile, start again.",
            ) from error

    def names(self) -> tuple[str, ...]:
        """Names of all files at the top level, sorted."""
        return tuple(sorted(self._stat))

    def size(self, name: str) -> int:
        """Bytes of one file.

        Raises:
            Exl3PackError: it is a link that leads nowhere.
        """
        if stat.S_ISLNK(self._stat[name].st_mode):
            with self._reading(name):
                return (self._root / name).stat().st_size
        return self._stat[name].st_size

    def read(self, name: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``start``.

        Raises:
            Exl3PackError: the file has become shorter since it was listed, or cannot be read.
        """
        with self._reading(name), open(self._root / name, "rb") as file:
            file.seek(start)
            data = file.read(length)
        if len(data) != length:
            raise Exl3PackError(
                found=f"{len(data)} bytes from byte {start}",
                expected=f"{length} bytes",
                where=f"{name} in {self.label}",
                remedy="The file changed while it was read: let the download finish, then start again.",
            )
        return data

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Many small ranges, in order; each file is opened once.

        Raises:
            Exl3PackError: a file has become shorter since it was listed.
        """
        found: dict[Range, bytes] = {}
        for name, group in itertools.groupby(sorted(set(ranges)), key=lambda item: item[0]):
            with self._reading(name), open(self._root / name, "rb", buffering=0) as file:
                for item in group:
                    found[item] = os.pread(file.fileno(), item[2], item[1])
        short = [item for item, data in found.items() if len(data) != item[2]]
        if short:
            self.read(*short[0])  # which raises with the place
        return [found[item] for item in ranges]

    def whole(self, name: str) -> bytes:
        """All bytes of one text file."""
        with self._reading(name):
            return (self._root / name).read_bytes()

    def branches(self) -> list[str]:
        """A folder has none."""
        return []

    def state(self) -> tuple[object, ...]:
        """Path of the folder; size, times and inode of every file, since copying tools may keep the first two."""
        files = tuple(
            (name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
            for name, found in sorted(self._stat.items())
        )
        return (os.path.abspath(self._root), self.commit, files)


def _files(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
    """The files of a folder; a link that leads nowhere stands for itself, and only reading it is an error."""
    for entry in entries:
        try:
            found = entry.stat()
        except OSError:
            found = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
            yield entry.name, found
