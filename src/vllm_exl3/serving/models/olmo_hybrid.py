"""OLMo hybrid: convolutions of q, k and v that vLLM's class has no loader for.

`OlmoHybridModel` sends the three stored convolutions to one layer, each tensor with the number of its part as an
attribute. That layer is a plain `ColumnParallelLinear`, whose loading passes the tensor on and leaves the attribute
unread, so the loader that its class sets is called without a part and stops, for a dense checkpoint as for a pack. Here
that loader reads the attribute. Applies to vLLM 0.30 to 0.33; a contract test stops it from outliving its reason.
"""

import functools
from typing import Any

import torch

__all__ = ["install", "is_olmo_hybrid"]


def is_olmo_hybrid(architecture: str) -> bool:
    """Whether a class name of ``config.json`` is of this family."""
    return architecture == "OlmoHybridForCausalLM"


@functools.cache
def install() -> None:
    """Replace the loader that the module's text names, once in a process."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

    stock = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader

    @functools.wraps(stock)
    def make(*args: Any, **kwargs: Any) -> Any:
        loader = stock(*args, **kwargs)

        def weight_loader(param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
            part = getattr(loaded_weight, "shard_id", None) if loaded_shard_id is None else loaded_shard_id
            loader(param, loaded_weight, part)

        return weight_loader

    olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = make
