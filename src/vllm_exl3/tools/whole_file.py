"""Files that are complete or absent, whenever the process is interrupted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a hidden path beside ``path`` to write to; it takes the place of ``path`` once the block has ended well.

    Args:
        path: the file; the path that is given has the same suffix.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
