"""The MoE op on CUDA with exllamav3's linears, one expert after the other: for comparison only.

It reads the routing on the host, so it cannot be captured in a CUDA graph: serve with ``--enforce-eager``.
"""

import torch

from vllm_exl3.cpu.moe import grouped_experts
from vllm_exl3.cuda import exllamav3

__all__ = ["moe_exllamav3"]

_TABLE = 11
"""Which of the op's arguments after ``x`` is the table."""


def moe_exllamav3(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    """The op; arguments as `vllm_exl3.ops.moe.moe` without the layer class."""
    table = arguments[_TABLE]
    assert isinstance(table, torch.Tensor)
    return grouped_experts(exllamav3.linear, x, *arguments[:_TABLE], table.cpu(), *arguments[_TABLE + 1 :])  # type: ignore[arg-type]
