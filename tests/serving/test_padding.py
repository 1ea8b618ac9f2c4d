"""vLLM masks padding by one data-parallel rank's tokens where it routes those of all: it must not be asked to."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm import envs

from vllm_exl3.serving.padding import route_padding

if not hasattr(envs, "VLLM_MOE_SKIP_PADDING"):
    pytest.skip("this vLLM does not mask padding", allow_module_level=True)

from vllm.model_executor.layers.fused_moe.router import fused_topk_router

LOCAL, ALL = 3, 6
"""Tokens of a rank, and of all."""


@pytest.fixture(autouse=True)
def masked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A forward pass of one rank, in a process whose settings are still open."""
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    context = SimpleNamespace(is_padding=torch.zeros(LOCAL, dtype=torch.bool))
    monkeypatch.setattr(fused_topk_router, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(fused_topk_router, "get_forward_context", lambda: context)
    envs.disable_envs_cache()
    yield
    envs.disable_envs_cache()


def test_vllm_still_gives_a_mask_that_is_too_short() -> None:
    mask = fused_topk_router._get_padding_mask(ALL)
    assert mask is not None and mask.shape == (LOCAL,)  # once this fails, `route_padding` has nothing to do any more


def test_no_mask_is_given_then() -> None:
    route_padding()
    assert fused_topk_router._get_padding_mask(ALL) is None
    route_padding()


def test_a_value_that_is_fixed_is_an_error() -> None:
    envs.enable_envs_cache()
    with pytest.raises(RuntimeError, match="Set VLLM_MOE_SKIP_PADDING=0"):
        route_padding()
