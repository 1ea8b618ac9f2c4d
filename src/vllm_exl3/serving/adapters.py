"""Requests without an adapter in one batch with others, on CPUs.

vLLM gives their tokens the adapter index -1. Its GPU kernels skip it; its CPU kernels, 0.30 to 0.33, index a tensor of
adapters with it, which takes the last one: the base model would answer as that adapter does.
"""

import functools
from collections.abc import Callable

import torch
from vllm.platforms import current_platform

__all__ = ["install_adapter_mask", "without_adapters"]

Shrink = Callable[..., None]


@functools.cache
def install_adapter_mask() -> None:
    """Let vLLM's CPU kernels for adapters leave tokens of the base model alone; once per process."""
    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):  # kernels for prompts call the first, those for single tokens the second
        module.bgmv_shrink = without_adapters(module.bgmv_shrink)


def without_adapters(shrink: Shrink) -> Shrink:
    """Wrap ``bgmv_shrink`` so that rows of the base model are zero: what is added to their outputs then is nothing.

    Args:
        shrink: fills the first columns of ``output_tensor [rows, rank]`` with ``inputs [rows, in]`` times each row's
            first matrix.
    """

    @functools.wraps(shrink)
    def shrink_and_clear(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor[lora_indices_tensor < 0] = 0

    return shrink_and_clear
