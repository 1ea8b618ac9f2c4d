"""Amounts of memory as people write them: ``24GiB``, ``24G``, ``24``, ``16384MiB``, and several with commas."""

import re

__all__ = ["GIB", "MIB", "parse_gib", "parse_gibs"]

MIB, GIB = 1 << 20, 1 << 30

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[gm]i?b?|ti?b?)", re.IGNORECASE)
_UNITS = {"": GIB, "g": GIB, "m": MIB, "t": 1 << 40}
_MOST = 1 << 60
"""More than any machine has; beyond it, numbers of bytes lose their last places."""


def parse_gib(text: str) -> int:
    """Bytes of one amount; GB means GiB, as memory is sold, and so does no unit.

    Raises:
        ValueError: it is no amount, zero, or more than an exbibyte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2][:1].lower()] if match else 0.0
    if not 1 <= size <= _MOST:
        raise ValueError(f"{text[:40]!r}: expected an amount of memory such as 24GiB")
    return int(size)


def parse_gibs(text: str) -> tuple[int, ...]:
    """Bytes of each of several amounts: ``24GiB,12GiB``."""
    return tuple(parse_gib(part) for part in text.split(","))
