"""How many processors this process may use, and how many of those others keep busy.

Linux only, from /proc and /sys; elsewhere all processors count, and nothing is known of others.
"""

import math
import os
import time
from pathlib import Path

__all__ = ["allowed", "busy_by_others", "measure_others", "quota"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def allowed() -> int:
    """Processors that this process may keep busy at once: those of its affinity mask, fewer under a cgroup's quota."""
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = quota()
    return mask if limit is None else max(1, min(mask, math.ceil(limit)))


def quota() -> float | None:
    """The least CPU time a second that a cgroup around this process allows, such as 1.5; None without a limit."""
    limits = [limit for folder in _cgroup_folders() if (limit := _quota_of(folder)) is not None]
    return min(limits, default=None)


def _cgroup_folders() -> list[Path]:
    """The folders of this process' cgroup and those around it, whose limits hold as well."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in [_CGROUP] if not controllers else [_CGROUP / controllers, _CGROUP / "cpu"]:
            # In a container the path is often the host's, and the container's own folder is the root.
            inside = Path(path.lstrip("/"))
            folders += [root / part for part in (inside, *inside.parents)]
    return folders


def _quota_of(folder: Path) -> float | None:
    try:
        if (v2 := folder / "cpu.max").exists():
            time_allowed, _, period = v2.read_text().partition(" ")
            return None if time_allowed == "max" else int(time_allowed) / int(period)
        time_allowed = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        return int(time_allowed) / int(period) if int(time_allowed) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def measure_others(seconds: float = 0.3) -> float | None:
    """Wait, and tell how many of this process' processors others kept busy meanwhile, such as 0.9.

    This process, the Pythons that started it (a server of several processes) and what those started are not others.
    """
    before = busy_by_others()
    start = time.monotonic()
    time.sleep(seconds)
    after = busy_by_others()
    if before is None or after is None:
        return None
    return max(0.0, after - before) / (time.monotonic() - start)


def busy_by_others() -> float | None:
    """Seconds that the processors of the affinity mask have worked for others since some fixed time, or None.

    Differences count. A process of ours that ends in between passes its time to its parent.
    """
    try:
        own = sum(_seconds(pid) for pid in _family())
        wanted = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        total = 0.0
        for line in (_PROC / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name in wanted:
                user, nice, system, _idle, _iowait, interrupts, soft = map(int, fields[:7])
                total += (user + nice + system + interrupts + soft) / _TICK
        return total - own
    except (OSError, AttributeError, ValueError):
        return None


def _seconds(pid: int) -> float:
    """CPU time of a process and of its children that ended."""
    fields = _fields(pid)
    return sum(map(int, fields[11:15])) / _TICK if fields else 0.0


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, from the state on; none where the process has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _family() -> set[int]:
    """This process, its ancestors that run the same program, and everything that those have started."""
    parents = {int(entry.name): int(fields[1]) for entry in _PROC.iterdir() if entry.name.isdigit() and (fields := _fields(int(entry.name)))}  # fmt: skip
    top = os.getpid()
    while (parent := parents.get(top, 0)) > 1 and _program(parent) == _program(os.getpid()):
        top = parent
    family = {top}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _program(pid: int) -> str | None:
    try:
        return os.readlink(_PROC / str(pid) / "exe")
    except OSError:
        return None
