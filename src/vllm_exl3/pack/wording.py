"""Pieces of sentences that several messages share."""

__all__ = ["byte_size", "counted"]


def byte_size(nbytes: float) -> str:
    """A size in the binary unit that leaves at least one digit before the point, such as ``12.0 MiB``."""
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def counted(count: int, noun: str) -> str:
    """A number and what it counts, such as ``1 tensor`` or ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
