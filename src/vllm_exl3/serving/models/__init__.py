"""What single model families need beyond the common path: one file a family, each with its reason."""

from collections.abc import Iterable

from vllm_exl3.serving.models import gpt_oss, mimo_v2, olmo_hybrid, qwen4_exp

__all__ = ["install_for"]

_REPLACEMENTS = (
    (gpt_oss.is_gpt_oss, gpt_oss.install),
    (mimo_v2.is_mimo_v2, mimo_v2.install),
    (olmo_hybrid.is_olmo_hybrid, olmo_hybrid.install),
    (qwen4_exp.is_qwen4_exp, qwen4_exp.install),
)


def install_for(architectures: Iterable[str]) -> None:
    """Replace, once in a process, the methods of vLLM's that leave a family no other way.

    Args:
        architectures: class names of a ``config.json``. To be called before a layer of the model is built.
    """
    for architecture in architectures:
        for belongs, install in _REPLACEMENTS:
            if belongs(architecture):
                install()
