"""Kernels that several files of tests run on the host."""

import pytest

from tests.cuda.host_kernels import HostKernels, build


@pytest.fixture(scope="session")
def moe_library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """All MoE kernels, compiled for the host."""
    return build("moe", tmp_path_factory.mktemp("moe"))
