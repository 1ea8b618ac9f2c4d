"""The int4 attention behind the backend of every supported release of vLLM."""

import pytest

from tests.versions.test_releases import OTHERS, run_in


@pytest.mark.slow
@pytest.mark.parametrize("release", OTHERS)
def test_the_backend_in_other_releases(release: str) -> None:
    run_in(release, "tests/attention/test_backend.py")
