"""Writes generated pages, or says which of them are out of date; for the other scripts of this folder."""

from collections.abc import Mapping
from pathlib import Path

__all__ = ["ROOT", "write_or_check"]

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(pages: Mapping[Path, str], *, check: bool) -> int:
    """Write the pages that are not current.

    Args:
        pages: the text of each file.
        check: write nothing, and print which files are out of date.

    Returns:
        The exit status: 1 if ``check`` has found one out of date.
    """
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale or pages)
        print(f"out of date: {names}: run `make docs`" if stale else f"current: {names}")
        return int(bool(stale))
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    return 0
