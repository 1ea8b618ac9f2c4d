"""Factors on logits that vLLM's transformers backend leaves out, so that a model would answer with other probabilities.

The backend takes a model's layers from transformers and computes the logits itself. Of what the classes there do to
logits it knows ``logit_scale`` and ``final_logit_softcapping``.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["LOGIT_FACTORS", "check_logit_factors"]

LOGIT_FACTORS = {
    "logits_scaling": "Granite, HyperCLOVA X",
    "lm_head_multiplier": "Falcon-H1",
    "dim_model_base": "MiniCPM",
    "output_multiplier": "Muse Glimmer",
    "output_multiplier_scale": "Grok",
    "output_mult": "TeleFLM",
    "mup_width_multiplier": "Phi-3-small",
    "logit_softcapping": "Laguna",
    "logits_soft_cap": "RecurrentGemma",
}
"""What config.json calls such a factor, and models that have it."""


def check_logit_factors(config: VllmConfig | None, where: str) -> None:
    """Refuse a model whose logits the backend would compute otherwise.

    Args:
        config: vLLM's current configuration, where there is one.
        where: the pack, for the error.

    Raises:
        Exl3PackError: naming the factor.
    """
    model = config.model_config if config is not None else None
    if model is None or not model.using_transformers_backend():
        return
    text = model.hf_text_config
    values = {name: getattr(text, name, None) for name in LOGIT_FACTORS}
    if name := next((name for name in values if _counts(name, values, getattr(text, "hidden_size", None))), None):
        raise Exl3PackError(
            found=f"{name} {values[name]} in config.json ({LOGIT_FACTORS[name]}), and vLLM's transformers backend, "
            "which leaves it out of the logits",
            expected="a backend that computes the model's own probabilities",
            where=where,
            remedy="Start without --model-impl transformers, with a vLLM that has this model class.",
        )


def _counts(name: str, values: Mapping[str, Any], hidden: Any) -> bool:
    """Whether a factor changes logits: 1 does not, nor a base width that is the model's."""
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value not in (0, hidden if name == "dim_model_base" else 1)
