"""Shared by all tests; its presence also puts this folder on the import path, for helpers such as `tiny_pack`."""

import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
GOLDEN_PACKS = sorted(path.name for path in (DATA / "packs").iterdir())

with contextlib.suppress(ImportError):  # a GPU machine may do without
    from hypothesis import settings

    # How long an example takes says something about the machine's other work only.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

# OpenMP's threads wait for each other by spinning, which takes a busy machine's cores from those waited for: tests took
# six times as long. It is read when torch loads the runtime, here and in what tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts the tests in the background lets them, and whatever they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What this package reads and what tests set; vLLM, torch and others set variables of their own as they start.
# EXL3_METRICS_FOLDER is how a process whose plugin is registered names its folder to the processes that it starts.
_OURS = re.compile(r"(?!EXL3_METRICS_FOLDER$).*(EXL3_|QUANTPACK_)")
_THEIRS = {"HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HOME", "TRITON_INTERPRET", "XDG_CACHE_HOME"}
_THEIRS |= {"VLLM_BATCH_INVARIANT", "VLLM_CACHE_ROOT", "VLLM_MOE_SKIP_PADDING", "VLLM_PLUGINS"}


def _shared_state() -> dict[str, str]:
    """What tests of one process share and must not change for those that follow."""
    state = {name: value for name, value in os.environ.items() if name in _THEIRS or _OURS.match(name)}
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_default_dtype"):
        state |= {"default dtype": str(torch.get_default_dtype()), "set_num_threads": torch.set_num_threads.__name__}
    else:
        state |= {"default dtype": "torch.float32", "set_num_threads": "set_num_threads"}
    return {**state, "current folder": os.getcwd()}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Every test has the same random numbers, whichever tests ran before it, and leaves what it found."""
    if hasattr(torch := sys.modules.get("torch"), "manual_seed"):
        torch.manual_seed(0)
    # Once vLLM has set its handlers, its logger hands nothing on. Pytest looks at that before it calls a test: one that
    # changes it itself hears everything twice.
    logging.getLogger("vllm").propagate = True
    before = _shared_state()
    yield
    assert _shared_state() == before, "this test changed what those after it find"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A warning where kernels are not those that ran on a GPU last: nothing else here would notice."""
    from tests.gpu.record import kernels_moved

    if (moved := kernels_moved()) is not None:
        terminalreporter.write_line(f"WARNING: {moved}", yellow=True)


@pytest.fixture(params=GOLDEN_PACKS)
def golden_pack(request: pytest.FixtureRequest) -> Path:
    """The folder of each pack that exllamav3 itself has written."""
    return DATA / "packs" / request.param
