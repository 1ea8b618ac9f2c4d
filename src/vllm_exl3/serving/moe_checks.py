"""What is asked of a MoE layer before and after it is loaded: that it runs as served, and is whole."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts

from vllm_exl3.ops.activation import ACTIVATIONS
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.moe_layout import ExpertLayout

__all__ = ["ActivationCall", "LoadedExperts", "activation_call", "check_scales", "refuse_unserved"]

_LEAVES = ("trellis", "suh", "svh", "bias")
_NAMED_MISSING = 4


@dataclass(frozen=True, slots=True)
class ActivationCall:
    """An activation of the op with its three numbers (see `vllm_exl3.ops.activation`)."""

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return ACTIVATIONS[self.name].gated


def activation_call(where: str, layer: RoutedExperts) -> ActivationCall:
    """What vLLM's layer asks for, in the op's terms.

    Raises:
        Exl3PackError: the activation is unknown, or comes with a limit that it does not take.
    """
    kind = str(getattr(layer.activation, "value", layer.activation))
    limit = layer.swiglu_limit if layer.swiglu_limit and math.isfinite(layer.swiglu_limit) else None
    moe = layer.moe_config
    calls = {
        "silu": lambda: ActivationCall("swiglu", limit=_or(limit, math.inf)),
        # gpt-oss' constants, where the model class does not set its own
        "swigluoai": lambda: ActivationCall(
            "swiglu", _or(layer.swiglu_alpha, 1.702), _or(layer.swiglu_beta, 1.0), _or(limit, 7.0)
        ),
        "swigluoai_uninterleave": lambda: ActivationCall(
            "swiglu", _or(layer.swiglu_alpha, 1.0), _or(layer.swiglu_beta, 0.0), _or(limit, math.inf)
        ),
        "swiglustep": lambda: ActivationCall("swiglu_step", limit=_or(limit, 7.0)),
        "situ": lambda: ActivationCall("situ", moe.activation_situ_beta, _or(moe.activation_situ_linear_beta, 0.0)),
        "gelu": lambda: ActivationCall("gelu"),
        "gelu_tanh": lambda: ActivationCall("gelu_tanh"),
        "silu_no_mul": lambda: ActivationCall("silu_ungated"),
        "gelu_no_mul": lambda: ActivationCall("gelu_ungated"),
        "gelu_tanh_no_mul": lambda: ActivationCall("gelu_tanh_ungated"),
        "relu2_no_mul": lambda: ActivationCall("relu2_ungated"),
    }
    if kind not in calls:
        raise _refusal(where, f"the activation {kind}", f"one of {', '.join(calls)}", "Please report the model.")
    call = calls[kind]()
    if limit is not None and math.isinf(call.limit):
        raise _refusal(
            where, f"a swiglu_limit of {limit:g} with the activation {kind}", "a limit only with SwiGLU activations",
            "vLLM's model class sets both; please report the model.",
        )  # fmt: skip
    return call


def refuse_unserved(where: str, layer: RoutedExperts) -> None:
    """Refuse what the engine's configuration asks for and EXL3 experts cannot do.

    Raises:
        Exl3PackError: EPLB, or LoRA on the experts.
    """
    if layer.moe_config.moe_parallel_config.enable_eplb:
        raise _refusal(
            where,
            "--enable-eplb",
            "experts that stay where they are: EPLB moves them as rows of equal size, and EXL3 experts may differ in "
            "bit rate, hence in size",
            "Leave out --enable-eplb; --enable-expert-parallel works without it.",
        )
    lora = get_current_vllm_config().lora_config
    targets = lora.target_modules if lora is not None else []
    if targets is None or any(target.rpartition(".")[2] == "experts" for target in targets):
        raise _refusal(
            where,
            "LoRA adapters on routed experts",
            "adapters on attention and other dense layers only",
            "Name them, for example --lora-target-modules q_proj k_proj v_proj o_proj.",
        )


class LoadedExperts:
    """Which tensors of a layer's experts its loaders have seen.

    Loaders that bypass ours (dummy weights, sharded state) leave it empty, which is no fault.

    Args:
        layout: the layer's experts.
    """

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        self._seen: set[tuple[str, int, int]] = set()

    def add(self, leaf: str, local: int, index: int) -> None:
        """Note a tensor; noting it twice, as layerwise reloading does, changes nothing."""
        self._seen.add((leaf, local, index))

    def check(self) -> None:
        """Refuse a layer of which some tensors came and others did not.

        Raises:
            Exl3PackError: naming some of the missing tensors.
        """
        if not self._seen:
            return
        missing = [
            f"{slot.linear.key}.{leaf}"
            for local, expert in enumerate(self._layout.slots)
            for index, slot in enumerate(expert)
            for leaf in _LEAVES
            if getattr(slot.linear, leaf) is not None and (leaf, local, index) not in self._seen
        ]
        self._seen.clear()
        if missing:
            more = f" and {len(missing) - _NAMED_MISSING} more" if len(missing) > _NAMED_MISSING else ""
            raise Exl3PackError(
                found=f"no data for {', '.join(missing[:_NAMED_MISSING])}{more}",
                expected="every tensor that the pack's headers list",
                where=self._layout.where,
                remedy="A shard was skipped while loading: compare model.safetensors.index.json with the files "
                "(vllm-exl3 inspect lists the differences).",
            )


def check_scales(layout: ExpertLayout, name: str, leaf: str, values: torch.Tensor) -> None:
    """Refuse loaded scales that would silently turn an expert into noise or nothing; one look per layer.

    Args:
        layout: the layer's experts.
        name: ``w13`` or ``w2``.
        leaf: ``suh`` or ``svh``.
        values: the flat parameter; every expert takes as much of it.

    Raises:
        Exl3PackError: a value is NaN or infinite, or all of a projection's are zero.
    """
    parts = len(layout.roles) - 1 if name == "w13" else 1
    largest = values.view(len(layout.slots) * parts, -1).abs().amax(dim=1)
    # NaN compares false, so one condition finds every fault, with one read back from the device. A tensor-parallel
    # rank may hold nothing but channels that the quantizer found dead.
    sound = ((largest < math.inf) & ((largest > 0) | layout.split)).cpu()
    if sound.all():
        return
    local, part = divmod(int((~sound).nonzero()[0]), parts)
    linear = layout.slots[local][part if name == "w13" else -1].linear
    stored = getattr(linear, leaf)
    raise Exl3PackError(
        found="NaN, infinite values, or only zeros",
        expected="finite scales, not all of them zero",
        where=f"{layout.where}, expert {layout.local[local]} ({stored.file}, {stored.name})",
        remedy="The file is damaged or its data never came: fetch the pack again, or convert the model again.",
    )


def _or(value: Any, default: float) -> float:
    return default if value is None else float(value)


def _refusal(where: str, found: str, expected: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)
