"""Registration with vLLM, and the refusal to share a process with another EXL3 plugin."""

import importlib.util
import logging
import os
from importlib.metadata import EntryPoint, entry_points

__all__ = ["conflicts", "register", "register_as_quantpack"]

logger = logging.getLogger("vllm.exl3")

_GROUP = "vllm.general_plugins"
_OWN_ENTRIES = ("vllm_exl3:register", "vllm_exl3:register_as_quantpack")
_NAME, _SECOND_NAME = "exl3", "vllm_exl3"
"""This package's entry points. vLLM calls one plugin of each name, the last it finds, so another ``exl3`` can
shadow the first; the second still gets here and says so."""
_OTHERS = ("vllm-quantpack", "orcasaq2", "qwen38-exl3-vision", "flint-vllm", "spark-vllm")
"""Distributions that are known to register or patch EXL3 serving."""

_registered = False


def register() -> None:
    """Register the quantization config, the hooks, the int4 attention and the metrics, once per process, and
    have an engine end with the process that started it.

    Raises:
        RuntimeError: another installed plugin serves EXL3 packs too.
    """
    global _registered  # noqa: PLW0603  vLLM calls this in every process, sometimes twice
    if _registered:
        return
    if found := conflicts():
        shadowed = any(entry.name == _NAME for entry in _others())
        raise RuntimeError(
            f"vllm-exl3 and {', '.join(found)} both serve EXL3 packs, and vLLM would use whichever loads last. "
            f"Either uninstall the other (pip uninstall {' '.join(found)}), "
            f"or let vLLM load only this one: VLLM_PLUGINS={_SECOND_NAME if shadowed else _NAME}."
        )
    from vllm.model_executor.layers.quantization import register_quantization_config

    from vllm_exl3.serving.config import Exl3Config
    from vllm_exl3.serving.embedding_hook import register_embedding_hook
    from vllm_exl3.serving.kv_register import register_attention
    from vllm_exl3.serving.metrics import register_metrics
    from vllm_exl3.serving.missing import register_parameter_watch
    from vllm_exl3.serving.parents import end_with_parent
    from vllm_exl3.serving.speculation import register_schedule

    register_quantization_config("exl3")(Exl3Config)
    register_embedding_hook()
    register_parameter_watch()
    register_attention()
    register_metrics()
    register_schedule()
    end_with_parent()
    _registered = True


def register_as_quantpack() -> None:
    """Serve a process whose ``VLLM_PLUGINS`` still names the plugin that served the packs before, and say so.

    Raises:
        RuntimeError: that plugin is installed too.
    """
    names = os.environ.get("VLLM_PLUGINS", "").split(",")
    if "quantpack" not in names or {_NAME, _SECOND_NAME} & set(names):
        return  # the entry points of this package's own name serve it
    logger.warning(
        "vllm-exl3: VLLM_PLUGINS=%s names vllm-quantpack; this package serves its packs, under another name: set "
        "VLLM_PLUGINS=%s, or unset it",
        os.environ["VLLM_PLUGINS"],
        ",".join(_NAME if name == "quantpack" else name for name in names),
    )
    register()


def conflicts() -> list[str]:
    """Names of other EXL3 plugins that vLLM would load in this process."""
    found = {_distribution(entry) for entry in _others()}
    # The earlier plugin of the same name leaves this extension behind. Whoever names the plugins to load knows.
    if "VLLM_PLUGINS" not in os.environ and importlib.util.find_spec("vllm_exl3_c") is not None:
        found.add("vllm_exl3_c")
    return sorted(found)


def _others() -> list[EntryPoint]:
    """Entry points of other EXL3 plugins, as far as ``VLLM_PLUGINS`` lets them load."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = allowed.split(",") if allowed is not None else None
    return [
        entry
        for entry in entry_points(group=_GROUP)
        if entry.value.replace(" ", "") not in _OWN_ENTRIES
        and (names is None or entry.name in names)
        and _serves_exl3(entry)
    ]


def _serves_exl3(entry: EntryPoint) -> bool:
    return entry.name == _NAME or _distribution(entry).lower().replace("_", "-") in _OTHERS


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
