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


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        _interpret(patch)
        yield
