"""The cache of each decoder layer, from config.json: keys and values, a window of them, a latent, a state.

Sources: the ``config.json`` of each family, and vLLM 0.32's ``v1/kv_cache_interface.py`` and
``layers/mamba/mamba_utils.py``. What is not listed here is named, never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_exl3.pack.metadata import text_config
from vllm_exl3.pack.skip import main_layers
from vllm_exl3.plan.shapes import head_dim, number

__all__ = ["CacheLayer", "Layers", "cache_layers", "layer_count"]

_MOST_LAYERS = 4096
"""More than any model has: a larger number in config.json is damage."""

UNKNOWN_TYPES = {
    "deepseek_v4": "its compressed and windowed caches",
    "deepseek_v41": "its compressed and windowed caches",
    "dots3": "its attention",
    "glm5_next": "the state of its KDA layers",
    "hy_v4": "its attention",
    "inkling": "its attention",
    "kimi_k3": "the state of its KDA layers",
    "kimi_linear": "the state of its KDA layers",
    "minimax_m3": "its sparse attention",
    "mimo_v2_flash": "its two kinds of heads",
}
"""Model types whose cache this page does not model, and what it is about them."""

INDEXER_BYTES = 4
"""Scale bytes of a sparse-attention indexer's key, beside one byte per element."""

_STATE_KINDS = ("linear_attention", "mamba", "mamba2", "gated_delta_net")
_WINDOW_KINDS = ("sliding_attention", "chunked_attention", "local_attention")
_ELEMENT = 2
"""Bytes of an element in the model's 16 bits."""
_STATES = 2
"""The present state and one that the prefix cache keeps; Mamba-2 layers add one at the end of a prompt."""
_NO_CACHE_KINDS = ("mlp", "moe")


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The cache of one layer.

    Attributes:
        kind: ``full`` and ``window`` keep keys and values of tokens, ``latent`` one latent of a token (MLA), ``state``
            a state of fixed size per request, ``none`` nothing.
        window: tokens that a ``window`` layer keeps.
        kv_heads: key/value heads of ``full`` and ``window`` layers.
        head_dim: elements of a key, and of a value.
        latent: elements of a token's latent.
        indexer: bytes of a token in a sparse-attention indexer's own cache.
        state: bytes of a request's recurrent state and of its convolution's, over all ranks.
        states: how many of them a request holds, with prefix caching (which is vLLM's default).
    """

    kind: str
    window: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    indexer: int = 0
    state: int = 0
    states: int = 0


@dataclass(frozen=True, slots=True)
class Layers:
    """All decoder layers in order, and what could not be told.

    Attributes:
        layers: one per decoder layer of the main model.
        unknown: sentences about caches that are not modelled; then no number of tokens can be given.
    """

    layers: tuple[CacheLayer, ...]
    unknown: tuple[str, ...] = ()


def layer_count(config: Mapping[str, Any]) -> int:
    """Decoder layers of the main model, or 0 where config.json gives no such number, or an absurd one."""
    count = main_layers(config)
    return count if 0 < count <= _MOST_LAYERS else 0


def cache_layers(config: Mapping[str, Any]) -> Layers:
    """The cache of every decoder layer of a model, from its ``config.json``."""
    text = text_config(config)
    count = layer_count(config)
    model_type = str(text.get("model_type", config.get("model_type", "")))
    unknown = [f"{model_type}: {what} is not modelled" for name, what in UNKNOWN_TYPES.items() if name == model_type]
    if not count:
        unknown.append("config.json gives no num_hidden_layers")
    kinds = _kinds(text, count)
    layers = []
    for kind in kinds:
        layer = _layer(kind, text)
        if layer is None:
            unknown.append(f"layers of type {kind} are not modelled")
            layer = CacheLayer("none")
        layers.append(layer)
    shared = number(text, "num_kv_shared_layers")
    if 0 < shared < count:  # the last layers of Gemma 3n read the caches of earlier ones
        layers[count - shared :] = [CacheLayer("none")] * shared
    if any(layer.kind in ("full", "window") and not (layer.kv_heads and layer.head_dim) for layer in layers):
        unknown.append("config.json gives no number of attention heads or no head size")
    return Layers(tuple(layers), tuple(dict.fromkeys(unknown)))


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """The kind of each layer, under whichever names the family has for it."""
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(kinds, list) and len(kinds) >= count and all(isinstance(kind, str) for kind in kinds):
        return [_plain(kind) for kind in kinds[:count]]
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H
        names = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
        return [names.get(letter, letter) for letter in pattern[:count]]
    if number(text, "linear_num_value_heads"):
        every = number(text, "full_attention_interval") or 4
        return ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(count)]
    if (period := number(text, "attn_layer_period")) > 1:  # Jamba
        offset = number(text, "attn_layer_offset")
        return ["full_attention" if index % period == offset else "mamba1" for index in range(count)]
    if text.get("use_sliding_window") is False or not number(text, "sliding_window"):
        return ["full_attention"] * count
    every = number(text, "sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}.get(
        str(text.get("model_type")), 0
    )
    return ["full_attention" if every and (index + 1) % every == 0 else "sliding_attention" for index in range(count)]


def _plain(kind: str) -> str:
    return {"attention": "full_attention", "hybrid": "full_attention"}.get(kind, kind)


def _layer(kind: str, text: Mapping[str, Any]) -> CacheLayer | None:
    """The cache of a layer of this kind, or None for a kind that is not modelled."""
    if kind in _NO_CACHE_KINDS:
        return CacheLayer("none")
    if kind in (*_STATE_KINDS, "conv"):
        state = _state_bytes(text, kind)
        held = _STATES + (number(text, "linear_num_value_heads") == 0 and kind != "conv")
        return CacheLayer("state", state=state, states=held) if state else None
    return _attention(kind, text) if kind in (*_WINDOW_KINDS, "full_attention") else None


def _attention(kind: str, text: Mapping[str, Any]) -> CacheLayer:
    window = kind in _WINDOW_KINDS
    if rank := number(text, "kv_lora_rank"):
        index = number(text, "index_head_dim")
        return CacheLayer("latent", latent=rank + number(text, "qk_rope_head_dim"),
                          indexer=index + INDEXER_BYTES if index and number(text, "index_topk") else 0)  # fmt: skip
    heads = number(text, "num_key_value_heads", "num_attention_heads")
    width = head_dim(text)
    layer = CacheLayer("full", kv_heads=heads, head_dim=width)
    if window:
        span = number(text, "sliding_window", "attention_chunk_size")
        return replace(layer, kind="window", window=span) if span else layer
    wide = number(text, "global_head_dim")  # Gemma 4: full layers have heads of another size, and fewer
    return (
        replace(layer, head_dim=wide, kv_heads=number(text, "num_global_key_value_heads") or heads) if wide else layer
    )


def _state_bytes(text: Mapping[str, Any], kind: str) -> int:
    """Bytes of one request's state in a short convolution, a gated delta net or a Mamba-2 layer; 0 if not given."""
    recurrent = _ELEMENT
    if text.get("mamba_ssm_dtype") == "float32" or (
        text.get("model_type") == "nemotron_h" and text.get("mamba_ssm_cache_dtype", "float32") == "float32"
    ):
        recurrent = 4
    if kind == "conv":  # LFM2's
        return _ELEMENT * number(text, "hidden_size") * max(number(text, "conv_L_cache") - 1, 1)
    if values := number(text, "linear_num_value_heads"):
        keys = number(text, "linear_num_key_heads")
        key_dim, value_dim = number(text, "linear_key_head_dim"), number(text, "linear_value_head_dim")
        channels = 2 * keys * key_dim + values * value_dim
        kept = channels * (max(number(text, "linear_conv_kernel_dim"), 2) - 1)
        return _ELEMENT * kept + recurrent * values * value_dim * key_dim
    heads = number(text, "mamba_num_heads", "mamba_n_heads")
    width, state = number(text, "mamba_head_dim", "mamba_d_head"), number(text, "ssm_state_size", "mamba_d_state")
    if not (heads and width and state):
        return 0
    groups = number(text, "n_groups", "mamba_n_groups") or 1
    kernel = number(text, "conv_kernel", "mamba_d_conv") or 4
    return _ELEMENT * (heads * width + 2 * groups * state) * (kernel - 1) + recurrent * heads * width * state
