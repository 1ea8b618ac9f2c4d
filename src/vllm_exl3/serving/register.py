"""Registration with vLLM, and the refusal to share a process with another EXL3 plugin."""

import importlib.util
import os
from importlib.metadata import EntryPoint, entry_points

__all__ = ["conflicts", "register"]

_GROUP = "vllm.general_plugins"
_OWN_ENTRY = "vllm_exl3:register"
_OTHERS = ("vllm-quantpack", "orcasaq2", "qwen38-exl3-vision", "flint-vllm", "spark-vllm")
"""Distributions that are known to register or patch EXL3 serving."""

_registered = False


def register() -> None:
    """Register the quantization config and the embedding hook, once per process.

    Raises:
        RuntimeError: another installed plugin serves EXL3 packs too.
    """
    global _registered  # noqa: PLW0603  vLLM calls this in every process, sometimes twice
    if _registered:
        return
    if found := conflicts():
        raise RuntimeError(
            f"vllm-exl3 and {', '.join(found)} both serve EXL3 packs, and vLLM would use whichever loads last. "
            f"Either uninstall the other (pip uninstall {' '.join(found)}), "
            "or let vLLM load only this one: VLLM_PLUGINS=exl3."
        )
    from vllm.model_executor.layers.quantization import register_quantization_config

    from vllm_exl3.serving.config import Exl3Config
    from vllm_exl3.serving.head import register_embedding_hook

    register_quantization_config("exl3")(Exl3Config)
    register_embedding_hook()
    _registered = True


def conflicts() -> list[str]:
    """Names of other EXL3 plugins that vLLM would load in this process."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = set(allowed.split(",")) if allowed is not None else None
    found = {_distribution(entry) for entry in entry_points(group=_GROUP) if _serves_exl3(entry, names)}
    # The earlier plugin of the same name leaves this extension behind; it takes effect by import alone.
    if importlib.util.find_spec("vllm_exl3_c") is not None:
        found.add("vllm_exl3_c")
    return sorted(found)


def _serves_exl3(entry: EntryPoint, allowed: set[str] | None) -> bool:
    if entry.value.replace(" ", "") == _OWN_ENTRY or (allowed is not None and entry.name not in allowed):
        return False
    return entry.name == "exl3" or _distribution(entry).lower().replace("_", "-") in _OTHERS


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
