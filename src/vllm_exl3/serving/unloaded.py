"""Weights in 16 bits that no tensor was loaded into.

vLLM looks for them in unquantized models only: a pack that lacks one would be served with whatever lay in that memory.
"""

from typing import Any, TypeVar

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["watched", "watched_experts"]

Method = TypeVar("Method", bound=QuantizeMethodBase)
Experts = TypeVar("Experts", bound=FusedMoEMethodBase)

_REMEDY = "A file of the pack is missing, or config.json is of another model: fetch the pack again."


def watched(method: Method, where: str) -> Method:
    """Let a method without quantization refuse, before the engine serves, a ``weight`` that was never written.

    Of linears, a ``bias`` too.

    The object stays of its class: vLLM compares classes to choose its own fast paths.

    Args:
        method: the method of one layer.
        where: the layer's name, for the error.
    """
    create_weights, process_weights = method.create_weights, method.process_weights_after_loading

    def create_and_mark(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        create_weights(layer, *args, **kwargs)
        # One value of each row, since the tensors of a fused layer fill different rows.
        layer.weight.data[:, 0] = torch.nan
        if isinstance(layer, LinearBase):
            _mark_bias_to_come(layer)

    def check_and_process(layer: torch.nn.Module) -> None:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and not weight.is_meta and weight.dim() > 1 and weight.numel():
            _check(f"{where}.weight", weight[:, 0].reshape(weight.shape[0], -1))
        bias = getattr(layer, "bias", None)
        if isinstance(layer, LinearBase) and isinstance(bias, torch.Tensor) and not bias.is_meta:
            _check(f"{where}.bias", bias.reshape(-1, 1))
        process_weights(layer)

    method.create_weights = create_and_mark  # type: ignore[method-assign]
    method.process_weights_after_loading = check_and_process  # type: ignore[method-assign]
    return method


def watched_experts(method: Experts, where: str) -> Experts:
    """The same for a layer of routed experts in 16 bits.

    Args:
        method: the layer's method, which keeps ``w13_weight [experts, gate and up, hidden]`` and ``w2_weight
            [experts, hidden, intermediate]``.
        where: the layer's name, for the error.
    """
    create_weights, process_weights = method.create_weights, method.process_weights_after_loading
    gated = method.moe.is_act_and_mul

    def create_and_mark(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        create_weights(layer, *args, **kwargs)
        for first in _first_values(layer, gated):
            first.fill_(torch.nan)

    def check_and_process(layer: torch.nn.Module) -> None:
        _check_experts(where, _first_values(layer, gated))
        process_weights(layer)

    method.create_weights = create_and_mark  # type: ignore[method-assign]
    method.process_weights_after_loading = check_and_process  # type: ignore[method-assign]
    return method


def _first_values(layer: torch.nn.Module, gated: bool) -> list[torch.Tensor]:
    """The first value of every stored projection ``[experts]``, which no padding replaces; none in kernels' layouts."""
    w13, w2 = layer.w13_weight.data, layer.w2_weight.data
    if w13.dim() != 3 or w2.dim() != 3 or not (w13.numel() and w2.numel()):
        return []
    parts = [w13[:, 0, 0], w2[:, 0, 0]]
    return [*parts, w13[:, w13.shape[1] // 2, 0]] if gated else parts


def _check_experts(where: str, values: list[torch.Tensor]) -> None:
    if not values or values[0].is_meta:
        return
    experts = int(torch.stack([part.float() for part in values]).isnan().any(dim=0).sum())
    if experts:
        raise Exl3PackError(
            found=f"{experts} of {len(values[0])} experts with weights that no tensor was loaded into, or with NaN",
            expected="a stored tensor, EXL3 or in 16 bits, for every projection of every expert",
            where=where,
            remedy=_REMEDY,
        )


def _mark_bias_to_come(layer: LinearBase) -> None:
    """Spoil the bias, which vLLM makes after the weights, and of whatever lies in that memory."""
    register = layer.register_parameter

    def register_and_mark(name: str, parameter: torch.nn.Parameter | None) -> None:
        if name == "bias":
            del layer.register_parameter  # the class' own again
            if parameter is not None:
                parameter.data.fill_(torch.nan)
        register(name, parameter)

    layer.register_parameter = register_and_mark  # type: ignore[method-assign]


def _check(where: str, values: torch.Tensor) -> None:
    """Refuse a parameter of which some of the values that stand for its rows ``[rows, any]`` are NaN."""
    rows = int(torch.isnan(values).any(dim=1).sum())
    if rows:
        raise Exl3PackError(
            found=f"{rows} of {values.shape[0]} rows that no tensor was loaded into, or that hold NaN",
            expected="a stored tensor, EXL3 or in 16 bits, for every layer that the model has",
            where=where,
            remedy=f"{_REMEDY} A pack without its vision or audio tower takes --limit-mm-per-prompt with 0 of each.",
        )
