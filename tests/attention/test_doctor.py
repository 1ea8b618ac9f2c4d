"""The doctor's check of the int4 attention passes, and finds what is wrong."""

import pytest
import torch

from tests.attention.cases import DEVICE, DTYPE
from vllm_exl3.attention import dispatch, write
from vllm_exl3.cli.doctor_attention import compare_attention


def test_it_passes() -> None:
    assert "largest relative error" in compare_attention(torch.device(DEVICE), DTYPE)


def test_keys_that_are_written_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    written = write.write_tokens
    monkeypatch.setattr(write, "write_tokens", lambda key, value, *rest: written(value, key, *rest))
    with pytest.raises(RuntimeError, match=r"written keys and values: error 1\.4"):
        compare_attention(torch.device(DEVICE), DTYPE)


def test_outputs_that_are_off_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = dispatch.Int4Attention.__call__

    def wrong(*arguments: object) -> None:
        attend(*arguments)  # type: ignore[arg-type]
        arguments[6].mul_(1.1)  # type: ignore[attr-defined]

    monkeypatch.setattr(dispatch.Int4Attention, "__call__", wrong)
    with pytest.raises(RuntimeError, match=r"1 query tokens a request: error 1\.0"):
        compare_attention(torch.device(DEVICE), DTYPE)
