"""MiMo-V2: a factor of the values that exllamav3 multiplies into the output projection of attention.

`attention_value_scale` in config.json is applied to the values; exllamav3 multiplies it into ``o_proj`` before it
quantizes that, and applies none afterwards. vLLM's attention applies it to the values whatever is stored, so a layer
whose ``o_proj`` is EXL3 would be scaled twice. `MiMoV2Attention`, of the model and of its draft alike, is built without
the factor there. An ``o_proj`` in 16 bits is stored as published, also by exllamav3, which scales it as it loads it.
Applies to vLLM 0.30 to 0.33.
"""

import functools
import logging
from typing import Any

__all__ = ["install", "is_mimo_v2"]

logger = logging.getLogger("vllm.exl3")


def is_mimo_v2(architecture: str) -> bool:
    """Whether a class name of ``config.json`` is of this family."""
    return architecture.startswith("MiMoV2")


@functools.cache
def install() -> None:
    """Replace what the module's text says, once in a process."""
    from vllm.model_executor.models.mimo_v2 import MiMoV2Attention

    stock = MiMoV2Attention.__init__

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        where = f"{kwargs.get('prefix', '')}.o_proj"
        if self.v_scale not in (None, 1.0) and _is_scaled(kwargs.get("quant_config"), where):
            logger.info("EXL3: %s of MiMo-V2 is in its o_proj already, as exllamav3 stores it", self.v_scale)
            self.v_scale = None

    MiMoV2Attention.__init__ = __init__


def _is_scaled(config: Any, where: str) -> bool:
    """Whether this output projection is EXL3 as exllamav3 writes it: its version is a bare one, others' have names."""
    from vllm_exl3.serving.config import Exl3Config

    if not isinstance(config, Exl3Config):
        return False
    resolution = config.names().find(where)
    parts = resolution.parts if resolution is not None else ()
    return any(part.linears for part in parts) and str(config.pack.quantization.get("version", "0"))[:1].isdigit()
