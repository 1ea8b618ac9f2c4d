"""Rows of families that take images: towers and projectors in EXL3, whole or in parts, and left as they are."""

from dataclasses import replace
from typing import Any

from tests.families.family import Family, Tensors, sizes
from tests.families.vision import FIRST_TOKEN, Vision

__all__ = ["VISION"]

_TEXT = {key: value for key, value in sizes("").items() if key != "model_type"}
_QKV = {"qkv": (("q_proj", 128), ("k_proj", 128), ("v_proj", 128))}
_TOWER = r"visual|vision_tower|projector"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
_ENGINE: dict[str, Any] = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}

_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
_QWEN_TOWER = {
    **{"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128},
    **{"num_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", **_PATCHES},
}
_QWEN_IDS = {
    "vision_start_token_id": FIRST_TOKEN,
    "image_token_id": FIRST_TOKEN + 1,
    "video_token_id": FIRST_TOKEN + 2,
    "vision_end_token_id": FIRST_TOKEN + 3,
}


def _qwen_processor(tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": _PIXELS}
    return Qwen3VLProcessor(Qwen2VLImageProcessor(**patches), tokenizer, Qwen3VLVideoProcessor(**patches))


def _glm_processor(tokenizer: Any) -> Any:
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": _PIXELS}
    return Glm4vProcessor(Glm4vImageProcessor(**patches), tokenizer, Glm4vVideoProcessor(**patches))


def _gemma_processor(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(Gemma3ImageProcessor(size={"height": 64, "width": 64}), tokenizer, image_seq_length=4)


def _pixtral_processor(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
    return PixtralProcessor(images, tokenizer, patch_size=16, spatial_merge_size=2)


_QWEN = Vision(
    _qwen_processor,
    ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"),
    ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
)
_GLM = Vision(
    _glm_processor,
    ("<|begin_of_image|>", "<|image|>", "<|video|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
)
_GEMMA = Vision(
    _gemma_processor,
    ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    ("<start_of_image>",),
    {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
)
_PIXTRAL = Vision(_pixtral_processor, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), ("[IMG]",))


def _as_published(tensors: Tensors) -> None:
    """Give the tower the names that Gemma 3 has on the Hub, which transformers 5 reads and does not write."""
    for name in [name for name in tensors if name.startswith("vision_tower.")]:
        tensors[name.replace("vision_tower.", "vision_tower.vision_model.", 1)] = tensors.pop(name)


_QWEN3_VL = Family(
    "qwen3_vl",
    {
        "model_type": "qwen3_vl",
        "text_config": {**_TEXT, "rope_scaling": _ROPE, "rope_parameters": _ROPE},
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
        **_QWEN_IDS,
    },
    architecture="Qwen3VLForConditionalGeneration",
    dense=_TOWER,
    vision=_QWEN,
    options=_ENGINE,
)
_GEMMA3 = Family(
    "gemma3",
    {
        "model_type": "gemma3",
        "text_config": {**_TEXT, "query_pre_attn_scalar": 32, "sliding_window": 8},
        "vision_config": {
            **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": 64, "patch_size": 16, "vision_use_head": False},
        },
        "mm_tokens_per_image": 4,
        "boi_token_index": FIRST_TOKEN,
        "image_token_index": FIRST_TOKEN + 1,
        "eoi_token_index": FIRST_TOKEN + 2,
    },
    architecture="Gemma3ForConditionalGeneration",
    dense=_TOWER,
    tied=True,
    edit=_as_published,
    vision=_GEMMA,
    options={**_ENGINE, "limit_mm_per_prompt": {"image": 1}},
)
_MISTRAL3 = Family(
    "mistral3",
    {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", **_TEXT, "tie_word_embeddings": False},
        "tie_word_embeddings": False,
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "head_dim": 32, "image_size": 64, "patch_size": 16},
        },
        "image_token_index": FIRST_TOKEN,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    architecture="Mistral3ForConditionalGeneration",
    dense=_TOWER,
    vision=_PIXTRAL,
    options={**_ENGINE, "limit_mm_per_prompt": {"image": 1}},
)
_GLM4V = Family(
    "glm4v",
    {
        "model_type": "glm4v",
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            **{"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128},
            **{"image_size": 64, **_PATCHES},
        },
        "image_start_token_id": FIRST_TOKEN,
        "image_token_id": FIRST_TOKEN + 1,
        "video_token_id": FIRST_TOKEN + 2,
        "image_end_token_id": FIRST_TOKEN + 3,
        "video_start_token_id": FIRST_TOKEN + 4,
        "video_end_token_id": FIRST_TOKEN + 5,
    },
    architecture="Glm4vForConditionalGeneration",
    dense=_TOWER,
    vision=_GLM,
    options=_ENGINE,
    unfused={"gate_up_proj": (("gate_proj", 256), ("up_proj", 256))},
)


def _quantized(family: Family, ending: str, kind: str, **changes: Any) -> Family:
    """The same family with its tower and projector in EXL3."""
    return replace(family, name=f"{family.name}_{ending}", kind=kind, dense=r"^$", **changes)


_QWEN3_5 = replace(
    _QWEN3_VL,
    name="qwen3_5",
    config={
        "model_type": "qwen3_5",
        "text_config": {
            **_TEXT,
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
            **{"linear_value_head_dim": 32, "layer_types": ["full_attention", "full_attention"]},
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
        },
        "vision_config": _QWEN_TOWER,
        **_QWEN_IDS,
    },
    architecture="Qwen3_5ForConditionalGeneration",
)

VISION = (
    replace(_QWEN3_VL, kind="a tower in 16 bits"),
    _quantized(_QWEN3_VL, "fused", "a tower whose attention is fused"),
    _quantized(_QWEN3_VL, "split", "a tower whose attention is in parts", unfused=_QKV),
    _QWEN3_5,
    _quantized(_QWEN3_5, "split", "a tower whose attention is in parts", unfused=_QKV),
    _GEMMA3,
    _quantized(_GEMMA3, "exl3", "a tower and its projector"),
    _MISTRAL3,
    _quantized(_MISTRAL3, "exl3", "a tower and its projector"),
    _quantized(_MISTRAL3, "merger", "a tower and its projector", also="merging_layer"),
    _GLM4V,
    _quantized(_GLM4V, "fused", "a tower whose attention is fused"),
    _quantized(_GLM4V, "split", "a tower whose attention is in parts", unfused={**_GLM4V.unfused, **_QKV}),
)
