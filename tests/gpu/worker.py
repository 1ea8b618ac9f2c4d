"""A pytest plugin for one of the processes that share a run's tests: each takes the next test that nobody has taken.

Used by ``run.py``. A test is taken by making a file of its name, which succeeds in one process; whoever asks first
takes those that are expected to last longest. What happens is told line by line in a file, so that it is known of a
process that dies.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DURATIONS", "claim_of"]

DURATIONS = "durations.json"
"""In the run's folder: expected seconds of tests, and of all tests of a file, by id."""

_UNKNOWN = 10.0
"""Seconds that a test is expected to take which was never run, in a file of which nothing is known."""


def claim_of(folder: Path, test: str) -> Path:
    """The file whose maker runs a test."""
    return folder / "claims" / hashlib.sha256(test.encode()).hexdigest()[:24]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--run-folder", type=Path, required=True)
    group.addoption("--worker", required=True, help="a name for this process")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Worker(config.getoption("--run-folder"), config.getoption("--worker")), "gpu-worker")


class Worker:
    """Runs what it can take, and tells.

    Args:
        folder: of the run.
        name: of this process.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.expected: dict[str, float] = json.loads((folder / DURATIONS).read_text(encoding="utf-8"))
        self.deselected = 0
        self.reports: list[pytest.TestReport] = []

    def tell(self, event: str, **facts: Any) -> None:
        """Append a line to this process' file."""
        with (self.folder / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.tell("uncollected", test=report.nodeid, outcome=report.outcome, reason=reason_of(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tell("collected", tests=[item.nodeid for item in session.items], deselected=self.deselected)

    def seconds_of(self, test: str) -> float:
        return self.expected.get(test, self.expected.get(test.partition("::")[0], _UNKNOWN))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in sorted(session.items, key=lambda item: -self.seconds_of(item.nodeid)):
            try:
                os.close(os.open(claim_of(self.folder, item.nodeid), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            self.reports.clear()
            self.tell("begun", test=item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            outcomes = {report.outcome for report in self.reports}
            outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
            reasons = [reason_of(report) for report in self.reports if report.outcome == outcome != "passed"]
            seconds = round(sum(report.duration for report in self.reports), 2)
            self.tell("ended", test=item.nodeid, outcome=outcome, seconds=seconds, reason="\n".join(reasons))
            if outcome == "failed" and (lost := lost_device()) is not None:
                self.tell("lost", reason=lost)  # every further test here would fail for the same reason
                break
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # vLLM's own shutdown can hang for a minute


def reason_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why something was skipped, or how it failed."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longreprtext)


def lost_device() -> str | None:
    """Why this process can use its GPU no more, or None: errors of kernels stay with a process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None
