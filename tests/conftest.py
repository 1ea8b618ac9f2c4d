"""Shared by all tests; its presence also puts this folder on the import path, for helpers such as `tiny_pack`."""

import contextlib
import signal
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
GOLDEN_PACKS = sorted(path.name for path in (DATA / "packs").iterdir())

with contextlib.suppress(ImportError):  # a GPU machine may do without
    from hypothesis import settings

    # How long an example takes says something about the machine's other work only.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

# A shell that starts the tests in the background lets them, and whatever they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=GOLDEN_PACKS)
def golden_pack(request: pytest.FixtureRequest) -> Path:
    """The folder of each pack that exllamav3 itself has written."""
    return DATA / "packs" / request.param
