"""Copies of large tensors through page-locked buffers: what arrives on the GPU, and in what order."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm_exl3.serving.staging import Staging, pays

SHAPES = [(256, 224, 64), (1, 4 << 20), ((3 << 20) + 5,), (7, 100_003), (4096, 3, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_tensors_arrive_whatever_becomes_of_the_source(shape: tuple[int, ...], inference: bool) -> None:
    """One after the other, so that buffers are filled again while the GPU may still be fetching from them."""
    stage = Staging(pays=lambda target, source: True)
    with torch.inference_mode(inference):
        sources = [torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16) for _ in range(6)]
        wanted = [source.cuda() for source in sources]
        targets = [torch.zeros(shape, dtype=torch.int16, device="cuda") for _ in sources]
        for target, source in zip(targets, sources, strict=True):
            stage.copy(target, source)
            source.zero_()
        found = [target + 0 for target in targets]  # by the stream that the copies are on, without waiting
        stage.release()
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_half_of_the_columns_as_a_rank_of_two_takes() -> None:
    stage = Staging(pays=lambda target, source: True)
    source = torch.randint(-(1 << 15), 1 << 15, (256, 224, 64), dtype=torch.int16)
    target = torch.zeros((256, 112, 64), dtype=torch.int16, device="cuda")
    stage.copy(target, source[:, 112:])
    assert torch.equal(target.cpu(), source[:, 112:])
    stage.release()


def test_on_another_stream_copies_wait_for_it() -> None:
    stage, source = Staging(), torch.ones(8 << 20, dtype=torch.int16)
    target = torch.zeros(8 << 20, dtype=torch.int16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        target.fill_(7)  # behind the pause: must not land on what is copied
        stage.copy(target, source)
    stream.synchronize()
    assert target.eq(1).all()
    stage.release()


def test_large_tensors_pay_unless_they_are_page_locked_already() -> None:
    source = torch.zeros(4 << 20, dtype=torch.int16)
    target = torch.empty_like(source, device="cuda")
    assert pays(target, source)
    assert not pays(target[: 2 << 20], source[: 2 << 20])
    assert not pays(target, source.pin_memory())
