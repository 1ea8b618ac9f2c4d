"""Starts the processes of ``gpu_two.py all``, watches them, and writes rows as results come."""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.two_compare import compare, reference_of
from benchmarks.two_engines import warm_up
from benchmarks.two_processes import Job, fork, gpu_memory_mib, kill, kill_a_rank
from vllm_exl3.tools.results import write_results

__all__ = ["LANES", "SPEEDS", "run_all"]

Row = dict[str, Any]
Command = Callable[[list[str]], None]

_DENSE = ("llama_tied-3.0-mul1", "llama_odd-4.0-mul1", "phi3-5.0-mul1", "qwen3-2.25-mul1-emb4")
_MORE = ("llama_tied-2.0-mcg", "llama_tied-1.0-3inst", "gemma2-6.0-mcg")
_MOE = ("qwen3_moe-3.0-mul1", "mixtral-4.0-3inst", "random-128-experts")

LANES: dict[str, list[str]] = {
    "one-dense": [f"one:{pack}" for pack in (*_DENSE, *_MORE)],
    "one-moe": [*(f"one:{pack}" for pack in _MOE), f"one-int4:{_DENSE[0]}", f"one-int4:{_MOE[1]}"],
    "one-graphs": [f"one-graphs:{_DENSE[0]}", f"one-graphs:{_MOE[0]}", f"one-int4-graphs:{_DENSE[0]}"],
    "tp2-dense": [f"tp2:{pack}" for pack in _DENSE],
    "tp2-more": [*(f"tp2:{pack}" for pack in _MORE), f"tp2-nccl:{_DENSE[0]}", f"tp2-nccl:{_MOE[1]}"],
    "tp2-moe": [f"tp2:{pack}" for pack in _MOE[1:]],
    "ep2-moe": [f"ep2:{pack}" for pack in _MOE],
    "pp2": [f"pp2:{_DENSE[0]}", f"pp2:{_MOE[0]}"],
    "tp2-graphs": [f"tp2-graphs:{_DENSE[0]}", f"tp2-graphs:{_MOE[1]}", f"tp2-nccl-graphs:{_DENSE[0]}"],
    "ep2-graphs": [f"ep2-graphs:{_MOE[2]}", f"ep2-graphs:{_MOE[0]}"],
    "tp2-int4": [f"tp2-int4:{_DENSE[0]}", f"tp2-int4:{_MOE[1]}", f"tp2-int4-graphs:{_DENSE[0]}"],
}
"""What processes run one after another, ``variant:pack`` each. The experts of the first MoE pack are one block of 128
wide, which tensor parallelism cannot divide."""

_DATA_PARALLEL = {"dp2-golden": f"dp2:{_MOE[0]}", "dp2-random": f"dp2-graphs:{_MOE[2]}"}
_VICTIM = "victim"
SPEEDS = {"exl3-2": ("exl3", 2), "exl3-1": ("exl3", 1), "bf16-2": ("bf16", 2), "bf16-1": ("bf16", 1)}
"""Kind of weights and ranks, in the order in which they are measured."""

_SPEED_SECONDS, _MOST_SPEED_SECONDS = 14, 30
"""What measuring one engine takes, and what it may take."""

_LOADED = re.compile(r"Model loading took .* GiB memory and ([\d.]+) seconds")

_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


_GPU = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}


@dataclass
class _Run:
    """Everything under way.

    Attributes:
        work: folder of logs and what engines computed.
        out: the results file.
        machine: its folder's name under results.
        command: runs this benchmark's command line in the process that calls it.
        environment: of processes.
        jobs: running processes by name.
        told: files that were turned into rows already.
    """

    work: Path
    out: Path
    machine: str
    command: Command
    environment: dict[str, str]
    jobs: dict[str, Job] = field(default_factory=dict)
    told: set[Path] = field(default_factory=set)
    begin: float = field(default_factory=time.monotonic)

    def start(self, name: str, *arguments: str, **environment: str) -> None:
        """A process with a log and a session of its own; each gets ports of its own.

        It is forked from this one, which has imported vLLM: dozens that import it at once take minutes.
        """
        port = str(21000 + 200 * len(self.jobs))
        settings = {**self.environment, "VLLM_PORT": port, **environment}
        self.jobs[name] = fork(self.work / f"{name}.log", settings, lambda: self.command(list(arguments)))

    def wait(self, done: Callable[[], bool], until: float) -> bool:
        """Turn results into rows until something is done or the time is over."""
        while not done():
            if time.monotonic() - self.begin > until:
                return False
            self.collect()
            time.sleep(0.3)
        self.collect()
        return True

    def collect(self) -> None:
        """Rows of what appeared since."""
        for path in sorted([*self.work.glob("*/*.npz"), *self.work.glob("*/*.failed"), *self.work.glob("*.rows")]):
            if path in self.told or path.name.endswith(".part.npz") or path.is_relative_to(self.work / "packs"):
                continue
            if path.suffix == ".rows":
                self._collect_lines(path)
                continue
            if path.suffix == ".npz" and not self._has_reference(path):
                continue
            self.told.add(path)
            self.write(compare(path, self.work))

    def _has_reference(self, path: Path) -> bool:
        reference = self.work / reference_of(path.parent.name)
        pack = path.name.removesuffix(".npz").removesuffix(".0").removesuffix(".1")
        return any((reference / f"{pack}{suffix}").exists() for suffix in (".npz", ".failed"))

    def _collect_lines(self, path: Path) -> None:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            key = path.with_suffix(f".{number}")
            if key not in self.told and line.endswith("}"):
                self.told.add(key)
                row = json.loads(line)
                if row["subject"] == "start":  # vLLM says it a rank
                    log = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
                    row["load_s"] = [float(found) for found in _LOADED.findall(log)]
                self.write(row)

    def write(self, row: Row) -> None:
        """One row into the results, in the place of what it measures anew, and onto the screen."""
        identity = [key for key in ("subject", "kernel", "pack", "mode", "ranks", "rank", "m") if key in row]
        write_results(
            self.out,
            [row],
            machine=self.machine,
            command="python benchmarks/gpu_two.py all",
            replaces=lambda old: all(old.get(key) == row[key] for key in identity),
        )
        print(_short(row), f"at {time.monotonic() - self.begin:.0f} s", flush=True)

    def end(self, name: str) -> None:
        """Kill a process and whatever it started."""
        kill(self.jobs[name])


def _short(row: Row) -> str:
    left_out = {"versions", "rank_states", "kernel"}
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in row.items()
        if key not in left_out
    )[:230]


def run_all(
    command: Command, *, work: Path, packs: Path, out: Path, seconds: float, only: list[str] | None, cpu: bool
) -> None:
    """Run everything and write rows.

    Args:
        command: runs this benchmark's command line in the process that calls it.
        work: emptied first.
        packs: the golden packs.
        out: the results file.
        seconds: how long it may take.
        only: beginnings of names.
        cpu: on CPU ranks.
    """

    def wanted(name: str) -> bool:
        return not only or any(name.startswith(beginning) for beginning in only)

    shutil.rmtree(work, ignore_errors=True)
    (work / "packs").mkdir(parents=True)
    for pack in packs.iterdir():
        (work / "packs" / pack.name).symlink_to(pack.resolve())
    environment = _CPU if cpu else _GPU
    os.environ |= environment  # some count while vLLM is imported
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # and end what was started
    warm_up()
    run = _Run(work, out, "cpu" if cpu else "h200-x2", command, environment)
    flags = ["--work", str(work), *(["--cpu"] if cpu else [])]
    try:
        _start(run, flags, wanted, cpu)
        _first_half(run, seconds, [name for name in SPEEDS if wanted(name)])
        _speeds(run, seconds, [name for name in SPEEDS if wanted(name)])
    finally:
        for name in run.jobs:
            run.end(name)
        run.collect()
    if not cpu:
        time.sleep(2)
        run.write({"kernel": "native", "subject": "memory left", "mib": gpu_memory_mib()[:2]})
    _tell_failures(run)


def _start(run: _Run, flags: list[str], wanted: Callable[[str], bool], cpu: bool) -> None:
    run.start("packs", "packs", *flags)
    for name in filter(wanted, SPEEDS):
        run.start(name, "speed", name, *flags, **({} if cpu or name != "bf16-1" else {"CUDA_VISIBLE_DEVICES": "1"}))
    if wanted(_VICTIM):
        run.start(_VICTIM, _VICTIM, _DENSE[0], *flags)
    for name, steps in LANES.items():
        if wanted(name):
            run.start(name, "lane", *steps, *flags)
    for number, (name, step) in enumerate(_DATA_PARALLEL.items()):
        if wanted(name):
            for rank in range(2):
                run.start(f"{name}-{rank}", "rank", str(rank), str(29600 + 20 * number), step, *flags)


def _first_half(run: _Run, seconds: float, speeds: list[str]) -> None:
    """Everything but speed; a rank is killed as soon as it serves."""
    others = [name for name in run.jobs if name not in SPEEDS and name != _VICTIM]
    until = seconds - 15 - _SPEED_SECONDS * len(speeds)
    if _VICTIM in run.jobs:
        log = run.work / f"{_VICTIM}.log"
        victim = run.jobs[_VICTIM]
        run.wait(lambda: b"GENERATING" in log.read_bytes() or not victim.is_alive(), until)
        run.write(kill_a_rank(victim, log, max(5.0, min(60.0, until - (time.monotonic() - run.begin)))))
    run.wait(lambda: all(not run.jobs[name].is_alive() for name in others), until)
    for name in others:
        if run.jobs[name].is_alive():
            run.write({"kernel": "native", "subject": "unfinished", "mode": name, "ok": False})
            run.end(name)


def _speeds(run: _Run, seconds: float, speeds: list[str]) -> None:
    """Let each engine measure, when all that will are ready, one after another."""

    def settled(name: str) -> bool:
        return (run.work / f"{name}.ready").exists() or not run.jobs[name].is_alive()

    run.wait(lambda: all(map(settled, speeds)), seconds - 10 - _SPEED_SECONDS * len(speeds))
    for name in speeds:
        left = seconds - 5 - (time.monotonic() - run.begin)
        if (run.work / f"{name}.ready").exists() and left > 10:
            (run.work / f"{name}.go").touch()
            job, done = run.jobs[name], run.work / f"{name}.done"

            def over(job: Job = job, done: Path = done) -> bool:
                return done.exists() or not job.is_alive()

            run.wait(over, time.monotonic() - run.begin + min(left, _MOST_SPEED_SECONDS))
        run.collect()
        run.end(name)


def _tell_failures(run: _Run) -> None:
    for name, job in run.jobs.items():
        if job.exitcode not in (0, -signal.SIGKILL):
            lines = (run.work / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line]
            print(f"{name} ended with {job.exitcode}: {(errors or lines or ['no log'])[-1][-200:]}", flush=True)
