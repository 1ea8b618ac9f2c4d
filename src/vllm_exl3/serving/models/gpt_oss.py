"""gpt-oss: experts whose tensors come one by one.

vLLM's class knows experts as tensors stacked over a layer, or one at a time in formats of its own; it renames a single
expert's ``down_proj.bias`` to the stacked tensor's name, and drops every name that it does not know. So
``GptOssForCausalLM.load_weights`` is replaced: where a layer's experts are EXL3, it hands their tensors to the layer
before anything is renamed; everything else goes to vLLM's function. Applies to vLLM 0.30 to 0.33.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["install", "is_gpt_oss"]

_EXPERT = re.compile(r"(?P<layer>.+\.mlp\.experts)\.(?P<rest>\d+\..+)")


def is_gpt_oss(architecture: str) -> bool:
    """Whether a class name of ``config.json`` is of this family."""
    return architecture == "GptOssForCausalLM"


@functools.cache
def install() -> None:
    """Replace what the module's text says, once in a process."""
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    stock = GptOssForCausalLM.load_weights

    @functools.wraps(stock)
    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        layers = {
            name.removesuffix(".routed_experts"): (name, module)
            for name, module in self.named_modules()
            if hasattr(module, "w13_trellis")
        }
        loaded: set[str] = set()

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for full_name, tensor in weights:
                match = _EXPERT.fullmatch(full_name)
                if match is None or match["layer"] not in layers:
                    yield full_name, tensor
                    continue
                name, module = layers[match["layer"]]
                loaded.update(f"{name}.{target}" for target in module.load_weights([(match["rest"], tensor)]))

        rest: set[str] = stock(self, others())
        return rest | loaded

    GptOssForCausalLM.load_weights = load_weights
