"""Laguna, Mistral 4 and MiMo-V2: routed up projections stored divided by 128, and no file of the pack says so.

exllamav3 divides while converting, for the range of its fp16 intermediates, and multiplies in its own architecture
code: every layer of Laguna and Mistral 4, the last of MiMo-V2. The division is visible in the input scales: gate and up
of one expert see the same inputs and are of like size, so their scales differ by the divisor. It is measured, not
assumed, since another converter may leave it out. Applies to every vLLM that has the classes (0.30 to 0.33).
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import architectures, text_configs

__all__ = ["may_be_divided", "routed_scale"]

_TYPES = frozenset(("laguna", "mistral4"))
_CLASSES = frozenset(("MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM"))
_DIVISOR = 128.0
_TOLERANCE = 4.0
"""Gate and up may differ by this much by themselves."""


def may_be_divided(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` describes a model some of whose routed experts exllamav3 divides."""
    types = {part.get("model_type") for part in text_configs(config)}
    return not (_TYPES.isdisjoint(types) and _CLASSES.isdisjoint(architectures(config)))


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
        expected=f"about 1, or about {_DIVISOR:g}, by which exllamav3 divides up projections",
        where=where,
        remedy="The pack was converted in a way that this version does not know: please report it.",
    )
