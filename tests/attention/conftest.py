"""Without a GPU, the kernels run in Triton's interpreter: it has to be on while they are defined and while they run."""

from collections.abc import Iterator

import pytest
import torch

_INTERPRETED = not torch.cuda.is_available()


def _interpret(patch: pytest.MonkeyPatch) -> None:
    if _INTERPRETED:
        patch.setenv("TRITON_INTERPRET", "1")


with pytest.MonkeyPatch.context() as _patch:
    _interpret(_patch)
    import vllm_exl3.attention.dispatch
    import vllm_exl3.attention.write  # noqa: F401
    from vllm_exl3.attention import decode


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        _interpret(patch)
        yield


@pytest.fixture(autouse=True)
def _devices_of_its_own() -> Iterator[None]:
    """Tests put GPUs of several sizes in one device's place, for which sizes of scratch are kept."""
    _forget_devices()
    yield
    _forget_devices()


def _forget_devices() -> None:
    decode._elements_of_one.cache_clear()
    decode._scratch_elements.cache_clear()
