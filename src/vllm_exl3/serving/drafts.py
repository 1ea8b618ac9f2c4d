"""Which model vLLM is building under speculation: the one that is served, or a draft, and what the draft is stored as.

vLLM builds a draft while the target's configuration is the current one (EAGLE, Medusa, DFlash, MTP) or under one of
its own (draft models). Its embedding is often built without a quantization config, which means that it has none, and
not that its class forgot to pass the target's on.
"""

import weakref
from typing import Any

from vllm.compilation import backends as compilation
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["draft_being_built", "draft_quantization", "refuse_pack_as_draft"]

_TAGS = ("draft_model", "extract_hidden_states")

_own: dict[int, tuple["weakref.ref[Any]", QuantizationConfig | None]] = {}
"""The quantization of each draft that has been built, by the identity of its configuration."""


def draft_being_built(config: VllmConfig | None) -> ModelConfig | None:
    """The configuration of the draft that is being built, or None while the model that is served is.

    Args:
        config: vLLM's current configuration, where there is one.
    """
    if config is None or config.speculative_config is None:
        return None
    speculation = config.speculative_config
    draft = speculation.draft_model_config
    # Without a draft model, as with n-gram speculation, vLLM names the target in its place.
    if draft is None or draft is speculation.target_model_config:
        return None
    tag = compilation.model_tag  # vLLM names what it builds, so that graphs of target and draft do not mix
    building = config.model_config is draft or tag.endswith("_head") or tag in _TAGS
    return draft if building else None


def draft_quantization(config: VllmConfig, draft: ModelConfig) -> QuantizationConfig | None:
    """The quantization of a draft's own checkpoint, which may be none.

    Args:
        config: vLLM's current configuration.
        draft: the draft that is being built.
    """
    target = config.speculative_config.target_model_config if config.speculative_config is not None else None
    same = target is not None and (draft.model, draft.revision) == (target.model, target.revision)
    if config.model_config is draft or same:  # MTP layers are in the target's pack
        return config.quant_config
    known = _own.get(id(draft))
    if known is None or known[0]() is not draft:
        own = VllmConfig.get_quantization_config(draft, config.load_config)
        known = _own[id(draft)] = (weakref.ref(draft), own)
    return known[1]


def refuse_pack_as_draft(config: VllmConfig | None, pack: str) -> None:
    """Refuse an EXL3 pack that is a draft of a class which vLLM builds under the target's configuration.

    Their layers are numbered after the target's, under names that no checkpoint has, and each of them makes a
    quantization config of its own: nobody would notice a tensor that finds no layer.

    Args:
        config: vLLM's current configuration, where there is one.
        pack: the pack that a configuration is being made for.

    Raises:
        Exl3PackError: it is such a draft.
    """
    draft = draft_being_built(config)
    if config is None or draft is None or config.speculative_config is None or config.model_config is draft:
        return
    target = config.speculative_config.target_model_config
    if target is None or pack != target.model:
        raise Exl3PackError(
            found=f"an EXL3 pack as a draft of method {config.speculative_config.method}",
            expected="a draft in 16 bits, a pack as a draft model (method draft_model), or MTP layers in the pack",
            where=pack,
            remedy="Give the 16-bit checkpoint of this draft in --speculative-config: drafts are small.",
        )
