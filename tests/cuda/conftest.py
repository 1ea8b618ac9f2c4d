"""Kernels that several files of tests run on the host."""

import ctypes

import pytest

from tests.cuda.host_kernels import build


@pytest.fixture(scope="session")
def moe_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All MoE kernels, compiled for the host."""
    return ctypes.CDLL(str(build("moe", tmp_path_factory.mktemp("moe"))))
