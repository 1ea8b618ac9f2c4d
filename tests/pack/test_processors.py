"""How many processors a process may use, and how busy others keep them, from made-up /proc and /sys trees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_exl3 import processors


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with proc and cgroup in place of the machine's."""
    monkeypatch.setattr(processors, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(processors, "_CGROUP", tmp_path / "cgroup")
    return tmp_path


def write(tree: Path, **files: str) -> None:
    for name, text in files.items():
        path = tree / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/a/b\n", {"cgroup__a__b__cpu_DOT_max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"cgroup__a__cpu_DOT_max": "50000 100000\n", "cgroup__a__b__cpu_DOT_max": "max 100000\n"}, 0.5),
        # A container sees the host's path, and its own limits at the root.
        ("0::/host/path\n", {"cgroup__cpu_DOT_max": "400000 100000\n"}, 4.0),
        ("0::/\n", {"cgroup__cpu_DOT_max": "max 100000\n"}, None),
        ("0::/\n", {"cgroup__cpu_DOT_max": "nonsense\n"}, None),
        ("0::/\n", {}, None),
        (
            "3:cpu,cpuacct:/x\n2:memory:/y\n",
            {
                "cgroup__cpu,cpuacct__x__cpu_DOT_cfs_quota_us": "250000\n",
                "cgroup__cpu,cpuacct__x__cpu_DOT_cfs_period_us": "100000\n",
            },
            2.5,
        ),
        ("1:cpu:/\n", {"cgroup__cpu__cpu_DOT_cfs_quota_us": "-1\n", "cgroup__cpu__cpu_DOT_cfs_period_us": "1\n"}, None),
    ],
)
def test_quotas(tree: Path, cgroup: str, files: dict[str, str], quota: float | None) -> None:
    write(tree, proc__self__cgroup=cgroup, **files)
    assert processors.quota() == quota


@pytest.mark.parametrize(
    ("mask", "quota", "allowed"),
    [({0, 1, 2, 3}, None, 4), ({0, 1, 2, 3}, 1.5, 2), ({4, 5}, 8.0, 2), ({7}, 0.2, 1)],
)
def test_the_smaller_of_mask_and_quota_is_allowed(
    mask: set[int], quota: float | None, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "_mask", lambda: mask)
    monkeypatch.setattr(processors, "quota", lambda: quota)
    assert processors.allowed() == allowed
    assert processors.allowed_set() == set(sorted(mask)[:allowed])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux's")
def test_the_affinity_mask_counts() -> None:
    one = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, [{one}]); from vllm_exl3 import processors; print(processors._mask())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == str({one})


def process(tree: Path, pid: int, parent: int, program: str, ticks: int) -> None:
    folder = tree / "proc" / str(pid)
    folder.mkdir(parents=True)
    fields = [f"{pid} (a (strange) name) S {parent}", *["0"] * 9, str(ticks), "0", "0", "0"]
    (folder / "stat").write_text(" ".join(fields))
    (folder / "exe").symlink_to(program)


def test_what_this_server_does_is_not_others(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors.os, "getpid", lambda: 30)
    monkeypatch.setattr(processors, "_mask", lambda: {0, 2})
    monkeypatch.setattr(processors, "_TICK", 100)
    process(tree, 1, 0, "/sbin/init", 7)
    process(tree, 10, 1, "/bin/sh", 1000)
    process(tree, 20, 10, "/usr/bin/python", 100)  # the server, which this process is a worker of
    process(tree, 30, 20, "/usr/bin/python", 200)
    process(tree, 31, 20, "/usr/bin/gcc", 300)
    process(tree, 40, 10, "/usr/bin/python", 5000)  # another program of the same shell
    write(tree, proc__stat="cpu 9 9 9\ncpu0 400 100 100 70 70 50 50\ncpu1 9999 0 0 0 0 0 0\ncpu2 500 0 0 9 9 0 0\n")
    assert processors.busy_by_others() == pytest.approx((400 + 100 + 100 + 50 + 50 + 500 - 600) / 100)


def test_nothing_is_known_without_proc(tree: Path) -> None:
    assert processors.busy_by_others() is None
    assert processors.measure_others(0) is None
    assert processors.quota() is None


@pytest.mark.parametrize(
    ("threads", "others", "quota", "said"),
    [
        (2, 1.0, None, "others keep 1.0 of 2 processors busy"),
        (2, 0.1, None, None),
        (1, 1.0, None, None),  # the other processor is free
        (1, 1.6, None, "GOMP_SPINCOUNT"),
        (2, None, None, None),
        (2, 0.0, 1.5, "a cgroup allows the time of 1.5 processors"),
    ],
)
def test_a_shortage_is_named_with_what_helps(
    threads: int, others: float | None, quota: float | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "_mask", lambda: {0, 1})
    monkeypatch.setattr(processors, "quota", lambda: quota)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    found = processors.shortage(threads, others)
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("set_to", "spins"),
    [({}, True), ({"OMP_WAIT_POLICY": "active"}, True), ({"OMP_WAIT_POLICY": "Passive"}, False)],
)
def test_who_waits_by_spinning(set_to: dict[str, str], spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert processors.waits_by_spinning() == spins
    monkeypatch.setattr(processors, "_mask", lambda: {0, 1})
    monkeypatch.setattr(processors, "quota", lambda: None)
    assert ("GOMP_SPINCOUNT" in str(processors.shortage(2, 1.0))) == spins
