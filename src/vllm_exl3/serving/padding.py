"""Routing where several data-parallel ranks share experts, which vLLM does with a mask that is too short.

vLLM 0.30 to 0.33 gathers the tokens of all ranks before it routes them, unless a method of experts exchanges tokens
itself, and masks those that only fill a CUDA graph up. The mask is that of a rank's own tokens: the routing kernel
refuses it ("is_padding size mismatch"). Without it, padding is routed like any token, and its outputs are dropped.
"""

import logging
import os

__all__ = ["route_padding"]

logger = logging.getLogger("vllm.exl3")

_VARIABLE = "VLLM_MOE_SKIP_PADDING"


def route_padding() -> None:
    """Have vLLM in this process route padding like any token, as ``VLLM_MOE_SKIP_PADDING=0`` does.

    Raises:
        RuntimeError: vLLM has fixed the variable's value already.
    """
    from vllm import envs

    if not getattr(envs, _VARIABLE, False):
        return
    os.environ[_VARIABLE] = "0"
    if getattr(envs, _VARIABLE):
        raise RuntimeError(
            f"experts over data-parallel ranks: found {_VARIABLE}=1, which this process cannot change any more, "
            f"expected 0, since vLLM would route all ranks' tokens with one's mask. Set {_VARIABLE}=0."
        )
    logger.info(
        "vllm-exl3 sets %s=0: all data-parallel ranks' tokens are routed, and one's mask does not fit", _VARIABLE
    )
