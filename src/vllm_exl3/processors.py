"""How many processors this process may use, and how many of those others keep busy.

Linux only, from /proc and /sys; elsewhere all processors count, and nothing is known of others.
"""

import contextlib
import math
import os
import time
from functools import lru_cache
from pathlib import Path

__all__ = [
    "SPINS",
    "allowed",
    "allowed_set",
    "busy_by_others",
    "cgroup_folders",
    "measure_others",
    "quota",
    "quota_threads",
    "shortage",
    "waits_by_spinning",
]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

SPINS = "10000"
"""``GOMP_SPINCOUNT`` for servers: some 0.2 ms, longer than a model's steps are apart and shorter than a time slice."""


def allowed() -> int:
    """Processors that this process may keep busy at once: those of its affinity mask, fewer under a cgroup's quota."""
    mask, limit = len(_mask()), quota()
    return mask if limit is None else max(1, min(mask, math.ceil(limit)))


def allowed_set() -> set[int]:
    """As many processors of the affinity mask as are `allowed`: what to start a program on whose threads follow it."""
    return set(sorted(_mask())[: allowed()])


def _mask() -> set[int]:
    """The processors on which some thread of this process may run: a runtime may have bound each thread to one."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    mask = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        for thread in (_PROC / "self/task").iterdir():
            mask |= os.sched_getaffinity(int(thread.name))
    return mask


def quota() -> float | None:
    """The least CPU time a second that a cgroup around this process allows, such as 1.5; None without a limit."""
    limits = [limit for folder in cgroup_folders("cpu") if (limit := _quota_of(folder)) is not None]
    return min(limits, default=None)


def cgroup_folders(controller: str) -> list[Path]:
    """The folders of this process' cgroup and those around it, whose limits hold as well.

    Args:
        controller: ``cpu`` or ``memory``.
    """
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root in [_CGROUP] if not controllers else [_CGROUP / controllers, _CGROUP / controller]:
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


@lru_cache(maxsize=1)
def quota_threads() -> int:
    """How many threads a cgroup's quota leaves room for, as it was at the first call; a large number without one."""
    limit = quota()
    return 1 << 16 if limit is None else max(1, math.ceil(limit))


def waits_by_spinning() -> bool:
    """Whether OpenMP's threads spin for long when they wait, as they do unless told otherwise at start."""
    policy = os.environ.get("OMP_WAIT_POLICY", "").strip().lower()
    return policy != "passive" and "GOMP_SPINCOUNT" not in os.environ


def shortage(threads: int, others: float | None) -> str | None:
    """What to say where ``threads`` have less than a processor each, with what others keep busy, or None.

    Args:
        threads: that work at the same time.
        others: what `measure_others` found.
    """
    have, limit = allowed(), quota()
    if limit is not None and limit < threads:
        return (
            f"{threads} threads, but a cgroup allows the time of {limit:g} processors: start the server on as many, "
            f"as in taskset -c {','.join(map(str, sorted(allowed_set())))} vllm serve"
        )
    if others is None or others < 0.5 or threads + others < have + 0.25:
        return None
    advice = "" if not waits_by_spinning() else (
        f": threads that wait by spinning then take turns with those waited for; start the server with "
        f"GOMP_SPINCOUNT={SPINS} in its environment (docs/serving.md)"
    )  # fmt: skip
    return f"others keep {others:.1f} of {have} processors busy, and {threads} threads are to work here{advice}"


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
        wanted = {f"cpu{index}" for index in _mask()}
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
    running = {int(entry.name): _fields(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit()}
    parents = {pid: int(fields[1]) for pid, fields in running.items() if fields}
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
