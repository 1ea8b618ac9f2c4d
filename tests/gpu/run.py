"""Run ``tests/gpu`` on one GPU by several processes at once, print a table, and record the run.

    python -m tests.gpu.run                               benchmarks/results/h200/tests.json
    python -m tests.gpu.run --slow --seconds 3600         every test
    python -m tests.gpu.run tests/gpu/test_moe.py --out FILE

In the repository's root, with ``PYTHONPATH=src`` where the package is not installed. Where vLLM is not installed, only
tests of kernels run; the record says so. Kernels of the packs are compiled first, by all cores. Each process imports
vLLM once and takes tests until none is left (``worker.py``), the longest first, as the last record has them. What has
not ended after ``--seconds`` is recorded as not run.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import vllm_exl3
from tests.gpu.record import RESULTS, ROOT, Row, without_folders, write_record
from tests.gpu.worker import DURATIONS, claim_of
from vllm_exl3.tools.results import need_gpus

TESTS = ["tests/gpu"]
POLL = 0.5
MOST_STARTS = 3
"""Times that a process is started again in another's place, for each of them."""

FIRST_GUESSES = {
    "test_server": 90, "test_whole_model": 40, "test_engine": 40, "test_kv_engine": 20, "test_memory": 30,
    "test_sanitizer": 60, "test_moe": 20, "test_linear": 20, "test_prefill": 15,
}  # fmt: skip
"""Seconds that a test of a file is taken to last of which no record is there."""


def environment(folder: Path) -> dict[str, str]:
    """Of the processes: what they import, and nothing that one of them could take from the others."""
    package = str(Path(vllm_exl3.__file__).parents[1])
    paths = [str(ROOT), package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not any(point.value == "vllm_exl3:register" for point in plugins()):
        info = folder / "site" / f"vllm_exl3-{vllm_exl3.__version__}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-exl3\nVersion: {vllm_exl3.__version__}\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_exl3 = vllm_exl3:register\n")
        paths.append(str(info.parent))
    defaults = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}  # since they share the cores
    defaults |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if importlib.util.find_spec("flashinfer") is None:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def plugins() -> tuple[importlib.metadata.EntryPoint, ...]:
    """vLLM's plugins that are installed."""
    return tuple(importlib.metadata.entry_points(group="vllm.general_plugins"))


class Run:
    """One run of some tests.

    Args:
        folder: where claims, logs and what processes tell are kept; empty or missing.
        caches: where each process keeps what vLLM compiles.
        tests: files, folders or ids, as pytest takes them.
        options: more of pytest's.
        processes: how many at once.
    """

    def __init__(
        self, folder: Path, caches: Path, tests: Sequence[str], options: Sequence[str], processes: int
    ) -> None:
        self.folder, self.caches, self.tests, self.options = folder, caches, tests, options
        self.variables = environment(folder)
        self.started: list[subprocess.Popen[bytes]] = []
        self.cut_off: set[str] = set()
        self.most = processes
        (folder / "claims").mkdir(parents=True)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process of its own session, which logs to a file."""
        # vLLM's cache of compiled models is not made for two processes that compile the same one at the same time.
        own = {"VLLM_CACHE_ROOT": str(self.caches / name)}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env={**self.variables, **own}, stdout=log, stderr=log, start_new_session=True
            )

    def start_worker(self) -> None:
        """One more process that takes tests."""
        name = f"worker-{len(self.started)}"
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.worker", "--run-folder", str(self.folder)]
        command += ["--worker", name, "-p", "no:cacheprovider", *self.options, *self.tests]
        self.started.append(self.start(name, command))

    def told(self) -> Iterator[Row]:
        """What processes have told until now."""
        for path in sorted(self.folder.glob("worker-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    yield {**json.loads(line), "worker": path.stem}

    def left(self) -> list[str]:
        """Tests that nobody has taken."""
        collected = {test for event in self.told() if event["event"] == "collected" for test in event["tests"]}
        return sorted(test for test in collected if not claim_of(self.folder, test).exists())

    def work(self, seconds: float) -> None:
        """Let processes run until all tests are done or the time is over."""
        deadline, said = time.monotonic() + seconds, time.monotonic()
        for _ in range(self.most):
            self.start_worker()
        try:
            while time.monotonic() < deadline:
                running = [process for process in self.started if process.poll() is None]
                replace = len(running) < self.most and len(self.started) < MOST_STARTS * self.most
                if replace and self.left():
                    self.start_worker()
                elif not running:
                    return
                if time.monotonic() - said > 30:
                    said = time.monotonic()
                    ended = Counter(event["outcome"] for event in self.told() if event["event"] == "ended")
                    print(f"{seconds - (deadline - said):4.0f} s: {dict(ended)}, {len(self.left())} left", flush=True)
                time.sleep(POLL)
        finally:
            for index, process in enumerate(self.started):
                if stop(process):
                    self.cut_off.add(f"worker-{index}")

    def rows(self) -> list[Row]:
        """What became of every test, and of files of which none were collected."""
        rows: dict[str, Row] = {}
        for event in sorted(self.told(), key=lambda event: event["event"] == "ended"):  # those last
            kind = event["event"]
            if kind == "collected":
                for test in event["tests"]:
                    rows.setdefault(test, {"test": test, "outcome": "not run", "seconds": 0.0})
            elif kind == "uncollected":
                rows[event["test"]] = {**row_of(event), "seconds": 0.0}
            elif kind == "begun":
                cut = event["worker"] in self.cut_off
                ending = {"outcome": "not run", "reason": "the time was over while it ran"}
                ending = ending if cut else {"outcome": "failed", "reason": "its process died"}
                rows[event["test"]] = {"test": event["test"], "seconds": 0.0, **ending}
            elif kind == "ended":
                rows[event["test"]] = row_of(event)
        return list(rows.values())

    def deselected(self) -> int:
        """How many tests were left out as slow."""
        return max((event["deselected"] for event in self.told() if event["event"] == "collected"), default=0)


def row_of(event: Row) -> Row:
    """The record's row of what a process told."""
    kept = {key: event[key] for key in ("test", "outcome", "seconds", "reason") if event.get(key) not in (None, "")}
    return {**kept, "reason": without_folders(str(kept["reason"]))[-1500:]} if "reason" in kept else kept


def stop(process: subprocess.Popen[bytes]) -> bool:
    """End a process and those that it has started, which share its session; says whether it was still running."""
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return running


def expected_seconds(record: Path) -> dict[str, float]:
    """Seconds of tests, and of one test of each file, by id: from the last record, or guessed."""
    found = {f"tests/gpu/{name}.py": float(seconds) for name, seconds in FIRST_GUESSES.items()}
    if record.exists():
        by_file = defaultdict(list)
        for row in json.loads(record.read_text(encoding="utf-8"))["rows"]:
            if row["outcome"] in ("passed", "failed"):
                found[row["test"]] = row["seconds"]
                by_file[row["test"].partition("::")[0]].append(row["seconds"])
        found |= {file: sum(seconds) / len(seconds) for file, seconds in by_file.items()}
    return found


def table(rows: Sequence[Row]) -> str:
    """A line a file, then what did not pass, then the longest."""
    files = defaultdict(list)
    for row in rows:
        files[row["test"].partition("::")[0]].append(row)
    lines = [f"{'':34s} passed failed skipped not run  seconds"]
    for name, of in [*sorted(files.items()), ("all", rows)]:
        counts = Counter(row["outcome"] for row in of)
        numbers = " ".join(f"{counts[key]:7d}" for key in ("passed", "failed", "skipped", "not run"))
        lines.append(f"{name:33s}{numbers} {sum(row['seconds'] for row in of):8.1f}")
    for row in rows:
        if row["outcome"] != "passed":
            reason = str(row.get("reason", ""))
            said = reason[-700:] if row["outcome"] == "failed" else reason.partition("\n")[0]
            lines.append(f"{row['outcome']}: {row['test']}: {said}")
    longest = sorted(rows, key=lambda row: -row["seconds"])[:12]
    return "\n".join([*lines, "longest:", *(f"{row['seconds']:7.1f}  {row['test']}" for row in longest)])


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS, help="as pytest takes them")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=max(1, min(10, cores * 5 // 8)), help="%(default)s here")
    parser.add_argument("--seconds", type=float, default=540, help="when to stop (%(default)s)")
    parser.add_argument("--slow", action="store_true", help="also the slow tests")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the record")
    parser.add_argument("--commit", help="of the sources, where git is not there to ask")
    parser.add_argument("--folder", type=Path, help="where to keep the processes' logs")
    return parser.parse_args()


def main() -> int:
    """Command line."""
    arguments = parsed()
    need_gpus()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="exl3-gpu-tests-") as temporary:
        folder = (arguments.folder or Path(temporary) / "run").resolve()
        options = [] if arguments.slow else ["-m", "not slow"]
        run = Run(folder, Path(temporary) / "vllm", arguments.tests, options, arguments.processes)
        (folder / DURATIONS).write_text(json.dumps(expected_seconds(RESULTS)), encoding="utf-8")
        # Processes import vLLM meanwhile, and wait for the kernels that are being compiled.
        compiling = run.start("compile", [sys.executable, "-m", "tests.gpu.compile_kernels"])
        try:
            run.work(arguments.seconds)
        finally:
            stop(compiling)
        print((folder / "compile.log").read_text(encoding="utf-8")[-2000:])
        rows, deselected = run.rows(), run.deselected()
        if not rows:
            print((folder / "worker-0.log").read_text(encoding="utf-8")[-4000:])
    print(table(rows))
    has_vllm = importlib.util.find_spec("vllm") is not None
    facts = {
        "seconds": round(time.monotonic() - started),
        "processes": arguments.processes,
        "left out as slow": deselected,
        "vllm": "installed" if has_vllm else "not installed: only tests of kernels ran",
        **({"commit": arguments.commit} if arguments.commit else {}),
    }
    asked = [*(["--slow"] if arguments.slow else []), *(arguments.tests if arguments.tests != TESTS else [])]
    meta = write_record(arguments.out, rows, command=" ".join(["python -m tests.gpu.run", *asked]), facts=facts)
    print(f"{meta['counts']} in {facts['seconds']} s, vLLM {facts['vllm']}: {arguments.out}")
    return int(meta["counts"]["passed"] == 0 or meta["counts"]["failed"] + meta["counts"]["not run"] > 0)


if __name__ == "__main__":
    sys.exit(main())
