"""Copies by threads and buffers are those of `Tensor.copy_`, however late the device fetches what it was sent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_exl3.serving.staging import Staging, pays


class LateBuffer:
    """Is fetched from when it is waited for and not before: a buffer that is filled too early shows."""

    made: "list[LateBuffer]"

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._target: torch.Tensor | None = None
        LateBuffer.made.append(self)

    def wait(self) -> None:
        if self._target is not None:
            self._target.copy_(self.memory[: self._target.numel()])
        self._target = None

    def send(self, target: torch.Tensor) -> None:
        assert self._target is None, "sent twice without waiting"
        self._target = target


def staging(nbytes: int, threads: int) -> Staging:
    LateBuffer.made = []
    return Staging(LateBuffer, nbytes, threads, pays=lambda target, source: True)


def copied(stage: Staging, source: torch.Tensor) -> torch.Tensor:
    """What arrives where the source is overwritten as soon as it may be."""
    target = torch.zeros(source.shape, dtype=source.dtype)
    stage.copy(target, source)
    source.zero_()
    for buffer in LateBuffer.made:
        buffer.wait()
    return target


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.int16, torch.bfloat16, torch.uint8]),
    cut=st.integers(0, 3),
    nbytes=st.integers(1, 5000),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_every_shape_arrives(
    shape: list[int], dtype: torch.dtype, cut: int, nbytes: int, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 256, [*shape[:-1], shape[-1] * dtype.itemsize], dtype=torch.uint8, generator=generator)
    whole = whole.view(dtype)
    source = whole[..., min(cut, shape[-1] - 1) :] if len(shape) == 1 else whole[:, min(cut, shape[1] - 1) :]
    wanted = source.clone().view(torch.uint8)
    stage = staging(nbytes, threads)
    assert torch.equal(copied(stage, source).view(torch.uint8), wanted)
    stage.release()


def test_buffers_are_made_once_and_given_back() -> None:
    stage = staging(1000, 2)
    source = torch.arange(5000, dtype=torch.int16)
    for again in range(3):
        assert torch.equal(copied(stage, source + again), source + again)
    made = len(LateBuffer.made)
    stage.release()
    stage.release()
    assert torch.equal(copied(stage, source.clone()), source)
    assert len(LateBuffer.made) == 2 * made
    stage.release()


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(64, 64), torch.rand(64, 64).double()),
        (torch.zeros(64, 64).t(), torch.rand(64, 64)),
        (torch.zeros(64, 64), torch.rand(64, 64).t()),
        (torch.zeros(64, 64), torch.rand(1, 64).expand(64, 64)[:, :1].expand(64, 64)),
        (torch.zeros(2, 2000), torch.rand(2, 2001)[:, :2000]),
        (torch.zeros(64, 64), torch.rand(1, 64)),
        (torch.zeros(()), torch.rand(())),
        (torch.zeros(0, 64), torch.rand(0, 64)),
        (torch.zeros(64, 0), torch.rand(64, 0)),
    ],
    ids=[
        "another dtype",
        "strided target",
        "strided rows",
        "expanded",
        "rows larger than a buffer",
        "one row for all",
        "a number",
        "no rows",
        "empty rows",
    ],
)
def test_what_threads_cannot_copy_is_copied_all_the_same(target: torch.Tensor, source: torch.Tensor) -> None:
    stage = staging(1000, 2)
    stage.copy(target, source)
    assert torch.equal(target, source.to(target.dtype).expand_as(target))
    assert not LateBuffer.made


@pytest.mark.parametrize("rows", [3, 5])
def test_other_shapes_are_refused_as_by_torch(rows: int) -> None:
    stage = staging(1000, 2)
    with pytest.raises(RuntimeError, match="must match"):
        stage.copy(torch.zeros(4, 64), torch.rand(rows, 64))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_threads_are_for_copies_to_a_gpu(device: str) -> None:
    large = torch.zeros(1 << 20, dtype=torch.int16)
    assert not pays(torch.empty_like(large, device=device), large)
    assert not pays(large, torch.empty_like(large, device=device))


def test_a_thread_s_error_is_the_copy_s() -> None:
    stage = staging(1000, 2)
    stage.copy(torch.zeros(1000), torch.rand(1000))
    LateBuffer.made[-1].wait()
    LateBuffer.made[-1].memory = torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="reshape"):
        stage.copy(torch.zeros(1000), torch.rand(1000))
    wanted = torch.rand(1000)
    assert torch.equal(copied(stage, wanted.clone()), wanted), "the copy after it lacks buffers"
