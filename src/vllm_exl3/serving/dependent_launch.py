"""Programmatic dependent launch for what Inductor compiles around this package's kernels.

A linear of this package fetches its first weights before it waits for the kernel ahead. That hides the fetch only where
the kernel ahead lets the next one start before its own end: norms, rotary embeddings and activations do, if Inductor is
told to make them so. vLLM hands ``inductor_compile_config`` to Inductor, and files compiled graphs under a hash of it.

Why nothing is read too early: a kernel of Inductor's waits before it reads what the kernel ahead wrote, and before it
reads anything where that one is not Inductor's; it lets the next one start after its own wait. Kernels of this package
wait before they touch what is not constant, and in every launch some block waits, so that the end of one is that of all
before it. Read in torch 2.11 and 2.13.
"""

import logging

from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from vllm_exl3 import env

__all__ = ["INDUCTOR_OPTION", "let_compiled_kernels_overlap"]

logger = logging.getLogger("vllm.exl3")

INDUCTOR_OPTION = "triton.enable_pdl"


def let_compiled_kernels_overlap(config: VllmConfig | None) -> None:
    """Ask for it while the model is built, before vLLM makes the compiler of its graphs; what the user set stays.

    Args:
        config: of the model that is being built.
    """
    wanted = env.DEPENDENT_LAUNCH.get()
    if config is None or wanted == "0":
        return
    if (reason := _why_not()) is not None:
        if wanted == "1":
            logger.warning("%s=1 changes nothing here: %s", env.DEPENDENT_LAUNCH.name, reason)
        return
    if wanted == "1" or _every_kernel_waits(config):
        config.compilation_config.inductor_compile_config.setdefault(INDUCTOR_OPTION, True)


def _every_kernel_waits(config: VllmConfig) -> bool:
    """Whether what is launched early waits, so that the end of a kernel is that of all before it.

    Inductor's kernels that only fill a buffer do not wait, and layers that carry a state have them; nor do vLLM's
    kernels for adapters, some of which it launches early. Of layers outside of a model nothing is known.
    """
    models = _models_that_share_options(config)
    return config.lora_config is None and models != [] and not any(m.is_hybrid or m.is_attention_free for m in models)


def _models_that_share_options(config: VllmConfig) -> list[ModelConfig]:
    """The model that is being built, and its target or draft: vLLM hands both compilers one dictionary of options."""
    speculation = config.speculative_config
    others = [] if speculation is None else [speculation.target_model_config, speculation.draft_model_config]
    return [model for model in (config.model_config, *others) if model is not None]


def _why_not() -> str | None:
    """Why compiled kernels cannot overlap in this process, or None."""
    if not (current_platform.is_cuda() and current_platform.has_device_capability(90)):
        return "kernels overlap on GPUs from Hopper on"
    from torch._inductor import config as inductor

    return None if hasattr(inductor.triton, "enable_pdl") else f"this torch's Inductor has no {INDUCTOR_OPTION}"
