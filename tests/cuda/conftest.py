"""What several files of tests share: kernels that run on the host, and what stands in the place of a device."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.cuda.host_kernels import HostKernels, build
from vllm_exl3.cuda import runtime

Device = TypeVar("Device")


@pytest.fixture(scope="session")
def moe_library(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """All MoE kernels, compiled for the host."""
    return build("moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture
def in_place_of_the_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], Device]:
    """Puts an object in the place of every `runtime.Device`, whose current stream is 7."""

    def put(device: Device) -> Device:
        monkeypatch.setattr(runtime, "device", lambda index: device)
        monkeypatch.setattr(runtime, "current_stream", lambda index: 7)
        return device

    return put
