#!/usr/bin/env python3
"""Families whose classes vLLM has on GPUs only: logits of a tiny random pack and of its decoded twin, on one GPU.

    python benchmarks/gpu_families.py [NAME ...] [--seconds 150] [--out FILE] [--logs FOLDER]

Every row of ``tests/families/gpu_rows.py`` is served in a process of its own, six at once, and gets a line as it ends:
the relative error of all logits and that of the worst position, or where it stopped (``writing`` the pack, serving the
``twin``, which is vLLM's own business, or serving the ``pack``) and why. A row whose class the installed vLLM lacks is
left out. After ``--seconds`` what still runs is ended. The exit status is 1 where a pack differs or was not served.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_exl3.tools.results import need_gpus, write_results

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 6
ROW_SECONDS = 100
"""What one row may take, its start included."""

OUT = ROOT / "benchmarks" / "results" / "h200" / "families.json"
PACKAGES = {
    "flashinfer": ("flashinfer",),
    "DeepGEMM": ("deep_gemm", "vllm.third_party.deep_gemm"),
    "tilelang": ("tilelang",),
}
"""Packages that rows need, to the modules of which one must be there."""

WITHOUT_ROW = {
    "nemotron_h_super_vl": "vLLM's class reads a configuration and a tokenizer that come with its repository's own "
    "code, of which no row was made; its text model is nemotron_h_moe's class",
    "spark2_5": "no release of vLLM has Spark2_5ForCausalLM, and vLLM refuses the model by that name",
}
"""Families that no row can be of, and why: said, so that their absence is no success."""

Row = dict[str, Any]


def one(name: str, folder: Path) -> Row:
    """Compare one row in this process.

    Args:
        name: of the row.
        folder: an empty folder.

    Returns:
        ``name``, ``outcome`` and what belongs to that outcome.
    """
    from tests.families.gpu_rows import GPU
    from tests.families.stand_ins import stand_in

    family = next(family for family in GPU if family.name == name)
    os.environ.update(family.variables)  # ahead of vLLM
    stand_in(family.unused)
    stages = ["writing"]
    try:
        from tests.families.compare import compare
        from tests.gpu.engines import serving

        for place, value in family.constants.items():
            module, _, constant = place.partition(":")
            setattr(importlib.import_module(module), constant, value)

        @contextmanager
        def start(model: Path, **options: Any) -> Iterator[Any]:
            stages.append(model.name)
            with serving(model, **{"num_gpu_blocks_override": None, **options}) as llm:
                yield llm

        found = compare(family, folder, start)
    except BaseException as error:
        traceback.print_exc()
        return {"name": name, **_why(error), "stage": stages[-1]}
    return {
        "name": name,
        "outcome": "ok" if found.is_served else "differs",
        "error": float(f"{found.error:.3g}"),
        "worst": float(f"{found.worst:.3g}"),
        "bound": found.bound,
        "same_tokens": found.same_tokens,
        **({} if found.choice is None else {"choice": {**asdict(found.choice), "is_tie": found.choice.is_tie}}),
        "kernels": found.kernels,
        "decoded": re.findall(r"^.*decoded.*$", found.report, re.MULTILINE)[:4],
        "dtype": family.options.get("dtype"),
    }


def _why(error: BaseException) -> Row:
    """The outcome that an exception stands for: what this package refused, or anything else with its last places."""
    from vllm_exl3.pack.errors import Exl3PackError

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    refusal = next((each for each in chain if isinstance(each, Exl3PackError)), None)
    first = refusal or chain[-1]
    frames = traceback.extract_tb(first.__traceback__)[-6:]
    return {
        "outcome": "refused" if refusal is not None else "fault",
        "reason": f"{type(first).__name__}: {first}"[:1500],
        "places": [
            f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames
        ],
    }


class Job:
    """One row in a process of its own.

    Args:
        name: of the row.
        folder: where its files are.
        variables: its environment.
    """

    def __init__(self, name: str, folder: Path, variables: dict[str, str]) -> None:
        self.name = name
        self._log, self._result = folder / f"{name}.log", folder / f"{name}.json"
        models = folder / name
        models.mkdir()
        own = {"VLLM_CACHE_ROOT": str(folder / f"{name}-cache")}
        command = [sys.executable, __file__, "--here", name, str(models), str(self._result)]
        self._began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**variables, **own}, stdout=log, stderr=log, start_new_session=True
            )

    def ended(self, deadline: float) -> Row | None:
        """The row, once it has ended or its time is over; None before that."""
        taken = time.monotonic() - self._began
        if self._process.poll() is None and not self._result.exists():
            if taken < ROW_SECONDS and time.monotonic() < deadline:
                return None
            self._end()
            return {"name": self.name, "outcome": "no result", "seconds": round(taken), **self._last_words()}
        if not self._result.exists():
            return {"name": self.name, "outcome": "died", "seconds": round(taken), **self._last_words()}
        self._end()
        row: Row = json.loads(self._result.read_text(encoding="utf-8"))
        return {**row, "seconds": round(taken)}

    def _end(self) -> None:
        """vLLM's own shutdown can hang for a minute after the last result."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_words(self) -> Row:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return {"reason": " | ".join(lines[-3:])[-900:], "status": self._process.returncode}


def run(names: list[str], seconds: float, logs: Path | None) -> Iterator[Row]:
    """Compare rows and give each as it ends; what engines log is copied to ``logs``."""
    from tests.gpu.run import environment

    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        variables = environment(folder)
        left, running = list(names), list[Job]()
        try:
            while left or running:
                while left and len(running) < AT_ONCE and time.monotonic() < deadline:
                    running.append(Job(left.pop(0), folder, variables))
                if not running:
                    break
                time.sleep(0.2)
                for job in list(running):
                    row = job.ended(deadline)
                    if row is not None:
                        running.remove(job)
                        yield row
        finally:
            for job in running:
                job.ended(0)
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for log in folder.glob("*.log"):
                    shutil.copy(log, logs)
    for name in left:
        yield {"name": name, "outcome": "not begun", "reason": f"{seconds:g} s were over"}


def line(row: Row) -> str:
    """What is printed of a row."""
    head = f"{row['name']:20s} {row['outcome']:9s} {row.get('seconds', 0):4d} s  "
    if "error" in row:
        tokens = "same tokens" if row["same_tokens"] else "other tokens{}".format(", a tie" * row["choice"]["is_tie"])
        text = f"error {row['error']:.2e}, worst {row['worst']:.2e}, allowed {row['bound']:.0e}, {tokens}"
        kernels = ", ".join(f"{op} {kernel}" for op, kernel in row["kernels"].items())
        return f"{head}{text}{', some modules decoded' if row['decoded'] else ''} ({row['dtype']}; {kernels})"
    stage = f"[{row['stage']}] " if "stage" in row else ""
    places = "".join(f"\n{'':22s}at {place}" for place in row.get("places", ()))
    return f"{head}{stage}{row['reason']}{places}"


def installed() -> dict[str, str]:
    """The rows that the installed vLLM has a class for, and why each other one is left out."""
    import vllm

    from tests.families.gpu_rows import GPU

    registry = (Path(vllm.__file__).parent / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    known = set(re.findall(r'^ +"(\w+)": \(', registry, re.MULTILINE))
    reasons = dict(WITHOUT_ROW)
    for family in GPU:
        named = family.architecture or next(iter(family.config.get("architectures", ())), "")
        absent = [package for package in family.needs if not any(map(_is_there, PACKAGES[package]))]
        if named and named not in known:
            reasons[family.name] = f"vLLM {vllm.__version__} has no {named}"
        else:
            reasons[family.name] = f"needs package {' and '.join(absent)}, which this machine lacks" if absent else ""
    return reasons


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor its parent
        return False


def _last_seconds(name: str) -> float:
    """Sorts rows that were not served yet first, then those that took longest."""
    rows = json.loads(OUT.read_text(encoding="utf-8"))["rows"] if OUT.exists() else []
    return -next((row["seconds"] for row in rows if row["name"] == name and row["outcome"] == "ok"), math.inf)


def main() -> int:
    """Compare the rows that the command line names, or all."""
    parser = argparse.ArgumentParser(description="Compare packs with their decoded twins on a GPU, family by family.")
    parser.add_argument("names", nargs="*", help="rows; all without")
    parser.add_argument("--seconds", type=float, default=150, help="for all of them")
    parser.add_argument("--out", type=Path, default=OUT, help="results file")
    parser.add_argument("--logs", type=Path, help="a folder for what the engines log")
    parser.add_argument("--here", nargs=3, metavar=("NAME", "FOLDER", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        name, folder, result = arguments.here[0], Path(arguments.here[1]), Path(arguments.here[2])
        row = one(name, folder)
        writing = result.with_suffix(".writing")
        writing.write_text(json.dumps(row), encoding="utf-8")
        writing.rename(result)
        os._exit(0)
    need_gpus()
    began = time.monotonic()
    reasons = installed()
    names = [name for name in reasons if not arguments.names or name in arguments.names]
    names.sort(key=_last_seconds)
    rows = [{"name": name, "outcome": "left out", "reason": reasons[name]} for name in names if reasons[name]]
    for row in rows:
        print(line(row), flush=True)
    left = arguments.seconds - (time.monotonic() - began)
    for row in run([name for name in names if not reasons[name]], left, arguments.logs):
        print(line(row), flush=True)
        rows.append(row)
    names = [row["name"] for row in rows]
    command = "python benchmarks/gpu_families.py"
    write_results(arguments.out, rows, machine="h200", command=command, replaces=lambda row: row["name"] in names)
    bad = [row["name"] for row in rows if row["outcome"] not in ("ok", "left out")]
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s; not ok: {', '.join(bad) or 'none'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
