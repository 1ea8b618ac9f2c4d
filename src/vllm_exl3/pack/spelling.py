"""How models spell module names: wrappers, fused projections, heads, embeddings, draft layers."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from vllm_exl3.pack.metadata import text_configs

__all__ = [
    "EMBEDDING_NAMES",
    "HEAD_NAMES",
    "SPLITS",
    "TOWER",
    "WITHOUT_GATE",
    "WITH_GATE",
    "canonical",
    "is_embedding_name",
    "is_head_name",
    "is_outside_layers",
    "keys_are_values",
    "renamed",
]

WRAPPERS = frozenset({"model", "language_model", "text_model", "transformer", "thinker", "base_model"})
"""Leading components that only say which wrapper class holds the text model."""

TOWER = r"\w*(?:visual|vision|audio|image|projector|connector)\w*"
"""A component of the names of what turns images or sound into embeddings, as a regular expression."""

EMBEDDING_NAMES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings", "embed")
HEAD_NAMES = ("lm_head", "embed_out", "output", "head")

SPLITS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "qkv_proj": (("q_proj", "k_proj", "v_proj"),),
    "qkv": (("q", "k", "v"), ("q_proj", "k_proj", "v_proj")),
    "query_key_value": (("q_proj", "k_proj", "v_proj"),),
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("w2",),),
    "kv_proj": (("k_proj", "v_proj"), ("key_proj", "value_proj")),
    "in_proj_qkvz": (("in_proj_qkv", "in_proj_z"),),
    "in_proj_ba": (("in_proj_b", "in_proj_a"),),
    "fused_qkv_a_proj": (("q_a_proj", "kv_a_proj_with_mqa"),),
    "in_proj_qkvbfg_a": (("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),),
    "wk_weights_proj": (("wk", "weights_proj"),),
    "fused_wqa_wkv": (("wq_a", "wkv"),),
    "fused_wkv_wgate": (("wkv", "wgate"),),
}
"""Unfused names that exllamav3 stores where the source model, and so vLLM's class, has a fused one."""

WITH_GATE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "in_proj_qkvgfab": ("g_proj", ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")),
}
"""Fused modules of other parts than vLLM's mapping says where one more of them is stored: Kimi K3's full-rank gate."""

WITHOUT_GATE: Mapping[str, tuple[str, tuple[str, ...]]] = {"fused_wkv_wgate": ("wgate", ("wkv",))}
"""Fused modules of fewer parts than vLLM's mapping says where one is not stored: compressors of DeepSeek V4.1 that pool
single tokens."""

_NUMBERED = re.compile(r"(?:^|\.)\d+(?=\.|$)")


def is_outside_layers(name: str, leaf: str) -> bool:
    """Whether a module name ends with ``leaf`` and lies in no numbered layer."""
    return name.rpartition(".")[2] == leaf and _NUMBERED.search(name) is None


def is_head_name(name: str) -> bool:
    """Whether a module name is that of an output head; inside a numbered layer nothing is."""
    return any(is_outside_layers(name, leaf) for leaf in HEAD_NAMES)


def is_embedding_name(name: str) -> bool:
    """Whether a module name is that of a token embedding; inside a numbered layer nothing is."""
    return any(is_outside_layers(name, leaf) for leaf in EMBEDDING_NAMES)


def canonical(name: str, main_layers: int) -> str:
    """``name`` without leading wrapper components, MTP layers numbered after the main stack.

    Args:
        name: a module's name, in the checkpoint's spelling or vLLM's.
        main_layers: decoder layers of the main model, or 0 when unknown.
    """
    parts = name.split(".")
    if len(parts) > 3 and parts[:2] == ["mtp", "layers"] and parts[2].isdigit() and main_layers:
        parts[:3] = ["layers", str(main_layers + int(parts[2]))]
    while len(parts) > 1 and parts[0] in WRAPPERS:
        del parts[0]
    return ".".join(parts)


def renamed(name: str, rename: Callable[[str], str | None]) -> str:
    """A tensor's name after one class' renaming, whose prefixes may begin below the wrappers of that class.

    Args:
        name: in the checkpoint, or as an outer class has renamed it.
        rename: gives the new name, or None for what the class drops, which keeps its name here.
    """
    if (found := rename(name)) != name:
        return found or name
    parts = name.split(".")
    for count in range(1, len(parts)):
        if parts[count - 1] not in WRAPPERS:
            break
        below = ".".join(parts[count:])
        found = rename(below)
        if found is not None and found != below and canonical(found, 0) != canonical(below, 0):
            return ".".join([*parts[:count], found])
    return name


def keys_are_values(config: Mapping[str, Any]) -> bool:
    """Whether some layers store keys once and use them as values too, as config.json says."""
    return any(bool(part.get("attention_k_eq_v")) for part in text_configs(config))
