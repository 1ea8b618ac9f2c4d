"""Files that are complete or absent, whenever the process is interrupted."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_target", "whole_file"]

_DEVICES = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Paths of what this process has open, even where that is a file: they are written to, never replaced."""

_NAME_BYTES = 200
"""Bytes of a file's name that are kept in the hidden one, which must stay within the system's 255."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a hidden path beside ``path`` to write to; it takes the place of ``path`` once the block has ended well.

    A link stays a link: the file that it leads to is replaced. A device or a pipe, such as ``/dev/stdout``, gets the
    content instead of being replaced.

    Args:
        path: the file; the path that is given has the same suffix.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    if _is_device(path):
        with tempfile.TemporaryDirectory() as folder:
            partial = Path(folder, _hidden(path))
            yield partial
            with partial.open("rb") as content, path.open("wb") as device:
                shutil.copyfileobj(content, device)
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(_hidden(target))
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        if error.filename == str(partial):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def check_target(path: Path) -> None:
    """Find out before a long measurement that its result could not be written; missing folders will be made.

    Raises:
        OSError: ``path`` is a folder, or lies where nothing can be written; the error names what is in the way.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if _is_device(path):
        return
    folder = Path(os.path.realpath(path)).parent
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        # Permissions do not say it: the administrator has all of them, and a file system may be read-only or full.
        descriptor, probe = tempfile.mkstemp(prefix=".", dir=folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    os.close(descriptor)
    os.unlink(probe)


def _is_device(path: Path) -> bool:
    return path.exists() and (os.path.abspath(path).startswith(_DEVICES) or not path.is_file())


def _hidden(path: Path) -> str:
    kept = os.fsdecode(os.fsencode(path.name)[-_NAME_BYTES:])
    return f".{os.getpid()}.{kept}"
