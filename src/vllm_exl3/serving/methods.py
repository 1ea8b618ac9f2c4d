"""Which method serves a linear or a layer of routed experts, from the headers of the tensors that it stands for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_exl3.pack.parts import Part
from vllm_exl3.serving.delegate import plain_experts, says_plain
from vllm_exl3.serving.fused import built_parts, padding_outputs
from vllm_exl3.serving.linear import Exl3LinearMethod
from vllm_exl3.serving.moe import Exl3MoEMethod
from vllm_exl3.serving.plain_layers import wants_a_matrix
from vllm_exl3.serving.transformers_backend import reads_matrix
from vllm_exl3.serving.unloaded import watched, watched_experts

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["experts_method", "linear_method", "why_dense"]

_DECLARED = "in the format that non_routed_quantization declares"


def _needs_a_matrix(config: "Exl3Config", layer: LinearBase, prefix: str) -> bool:
    """True where code of vLLM or transformers reads or fills the layer's ``weight`` past its method."""
    current = get_current_vllm_config_or_none()
    return bool(padding_outputs(layer)) or wants_a_matrix(config.pack.config, prefix) or reads_matrix(current, prefix)


def linear_method(config: "Exl3Config", layer: LinearBase, prefix: str) -> QuantizeMethodBase:
    """The method of a linear: EXL3 where one of its tensors is, else that of the format of the other layers."""
    resolution = config.names().resolve(prefix)
    parts = built_parts(layer, resolution.parts if resolution is not None else ())
    is_exl3 = any(part.linears for part in parts)
    if any(part.slices for part in parts) or (is_exl3 and _needs_a_matrix(config, layer, prefix)):
        return UnquantizedLinearMethod()  # which `DecodedModules` finds once the model is built
    config.claimed.update(part.key for part in parts)
    if any(part.linear is not None for part in parts):
        return Exl3LinearMethod(config, prefix, parts)
    keys = [part.key for part in parts]
    plain = says_plain(config.pack, [(part.key, part.dense) for part in parts])
    source = config.source_format()
    method = source.linear(layer, prefix, keys, config.mappers, config.packed_modules_mapping, plain)
    if type(method) is UnquantizedLinearMethod:
        watched(method, prefix)
    config.report.add_dense(prefix, why_dense(method, parts))
    return method


def experts_method(config: "Exl3Config", layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
    """The method of a layer of routed experts: that of the format of the other layers where none of them is EXL3."""
    group = config.names().resolve_experts(prefix)
    if group is None:
        source, plain = config.source_format(), plain_experts(config.pack, prefix)
        method = source.experts(layer, prefix, config.mappers, config.packed_modules_mapping, plain)
        config.report.add_dense(prefix, "no EXL3 experts stored" if method is None else _DECLARED)
        if method is None:
            method = UnquantizedFusedMoEMethod(layer.moe_config)  # as vLLM would in place of None
        return watched_experts(method, prefix) if isinstance(method, UnquantizedFusedMoEMethod) else method
    config.claimed.update(key for roles in group.members.values() for key in roles.values())
    return Exl3MoEMethod(config, prefix, layer, group)


def why_dense(method: QuantizeMethodBase, parts: Sequence[Part]) -> str:
    """What the report says of a layer that is not EXL3."""
    if not isinstance(method, UnquantizedLinearMethod):
        return _DECLARED
    dtypes = dict.fromkeys(part.dense.dtype for part in parts if part.dense is not None)
    return f"stored as {' and '.join(dtypes)}" if dtypes else "nothing of this name stored"
