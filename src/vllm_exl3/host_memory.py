"""How many bytes of host memory this process may still take, from /proc/meminfo and the cgroups around it."""

from collections.abc import Iterator
from pathlib import Path

from vllm_exl3 import processors

__all__ = ["available"]

_MEMINFO = Path("/proc/meminfo")


def available() -> int | None:
    """Bytes that are free or can be freed, within every cgroup's limit; None where nothing tells."""
    return min(_known(), default=None)


def _known() -> Iterator[int]:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10
    for folder in processors.cgroup_folders("memory"):
        # Version 2, then version 1; page cache counts as used, and is given up before anything is killed.
        for limit, used, cache in (
            ("memory.max", "memory.current", "file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
        ):
            try:
                most = int((folder / limit).read_text())
                taken = int((folder / used).read_text()) - _cached(folder / "memory.stat", cache)
            except (OSError, ValueError):  # "max": no limit
                continue
            yield max(most - taken, 0)


def _cached(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
