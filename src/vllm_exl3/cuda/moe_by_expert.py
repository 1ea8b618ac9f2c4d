"""The MoE op on CUDA with exllamav3's linears, one expert after the other: for comparison only.

It reads the routing on the host, so it cannot be captured in a CUDA graph: serve with ``--enforce-eager``.
"""

from typing import Any

import torch

from vllm_exl3.cuda import exllamav3
from vllm_exl3.ops.moe import MoECall, refuse_capture
from vllm_exl3.ops.moe_by_expert import grouped_experts

__all__ = ["moe_exllamav3"]


def moe_exllamav3(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The op; arguments as `vllm_exl3.ops.moe.moe` without the layer class.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    refuse_capture("exllamav3", x.device)
    call = MoECall(*arguments)
    return grouped_experts(exllamav3.linear, x, call._replace(table=call.table.cpu()))
