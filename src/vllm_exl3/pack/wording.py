"""Pieces of sentences that several messages share."""

from collections.abc import Sequence

__all__ = ["byte_size", "counted", "format_bytes"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def byte_size(nbytes: float) -> str:
    """A size in the binary unit that leaves at least one digit before the point, such as ``12.0 MiB``."""
    value, unit = _scaled(nbytes / 1024, _UNITS[1:4])
    return f"{value:.{2 if unit == 'GiB' else 1}f} {unit}"


def format_bytes(size: int) -> str:
    """A size with up to four digits and a binary unit."""
    value, unit = _scaled(size, _UNITS)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"


def _scaled(value: float, units: Sequence[str]) -> tuple[float, str]:
    """A size in the first of these units in which it is below 1024, or in the last."""
    for unit in units[:-1]:
        if value < 1024:
            return value, unit
        value /= 1024
    return value, units[-1]


def counted(count: int, noun: str) -> str:
    """A number and what it counts, such as ``1 tensor`` or ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
