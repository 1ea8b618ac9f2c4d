"""How a layer of routed experts hands what vLLM gives it to its parameters, by the names of experts' tensors."""

from collections.abc import Callable, Iterable, Iterator

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["expert_loader"]

_ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_SHARD_IDS = {"gate": "w1", "up": "w3", "down": "w2"}


def expert_loader(layer: RoutedExperts) -> Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[str]]:
    """The layer's ``load_weights``: takes ``<expert>.<projection>.<leaf>``, whichever way projections are called."""

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        for full_name, loaded_weight in weights:
            name = full_name.removeprefix("routed_experts.")
            expert, _, rest = name.partition(".")
            projection, _, leaf = rest.partition(".")
            role = _ROLES.get(projection)
            if role is None or not expert.isdecimal():
                yield _load_other(layer, name, loaded_weight)
                continue
            target = f"{'w2' if role == 'down' else 'w13'}_{leaf}"
            param = getattr(layer, target, None)
            if param is None:
                raise _unknown(layer, name, f"{role} has no parameter {target}")
            if param.weight_loader(param, loaded_weight, name, _SHARD_IDS[role], int(expert), return_success=True):
                yield target

    return load_weights


def _load_other(layer: RoutedExperts, name: str, loaded_weight: torch.Tensor) -> str:
    """Load a parameter of the layer that is no expert's, such as the router's correction bias."""
    param = dict(layer.named_parameters(recurse=False)).get(name)
    if param is None:
        raise _unknown(layer, name, "no expert's tensor and no parameter of the layer")
    getattr(param, "weight_loader", default_weight_loader)(param, loaded_weight)
    return name


def _unknown(layer: RoutedExperts, name: str, found: str) -> Exl3PackError:
    return Exl3PackError(
        found=f"{name}: {found}",
        expected="<expert>.<projection>.<leaf> with gate_proj, up_proj, down_proj or w1, w3, w2",
        where=layer.layer_name,
        remedy="The pack stores its experts in a way that this version does not know: please report it with the "
        "output of `vllm-exl3 inspect`.",
    )
