"""Laguna: its routed up projections are stored divided by 128, and no file of the pack says so.

exllamav3 divides while converting, for the range of its fp16 intermediates, and multiplies in its own
architecture code. The division is visible in the input scales: gate and up of one expert see the same
inputs and are of like size, so their scales differ by the divisor. It is measured, not assumed, since
another converter may leave it out. Applies to every vLLM that has the class (0.30 to 0.33).
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["is_laguna", "routed_scale"]

_DIVISOR = 128.0
_TOLERANCE = 4.0
"""Gate and up may differ by this much by themselves."""


def is_laguna(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` describes a Laguna model."""
    return config.get("model_type") == "laguna"


def routed_scale(where: str, suh: torch.Tensor, experts: int) -> float:
    """What the routed experts' outputs must be multiplied by: 128, or 1 where nothing was divided.

    Args:
        where: the layer, for the error.
        suh: the flat ``w13_suh``, gate and up of each expert.
        experts: how many experts it holds.

    Raises:
        Exl3PackError: the scales' ratio is near neither.
    """
    sizes = suh.view(experts, 2, -1).float().abs().mean(dim=2)
    ratio = float((sizes[:, 0] / sizes[:, 1]).median())
    for scale in (1.0, _DIVISOR):
        if scale / _TOLERANCE < ratio < scale * _TOLERANCE:
            return scale
    raise Exl3PackError(
        found=f"gate scales {ratio:.3g} times as large as up's",
        expected=f"about 1, or about {_DIVISOR:g}, by which exllamav3 divides Laguna's up projections",
        where=where,
        remedy="The pack was converted in a way that this version does not know: please report it.",
    )
