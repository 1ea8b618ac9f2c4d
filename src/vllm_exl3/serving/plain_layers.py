"""Layers whose ``weight`` vLLM's own code reads or reorders, so that they are decoded although they could be EXL3.

vLLM gives these layers a quantization config, and then reads a dense matrix all the same, or sorts the rows of one
while it loads it. The classes that were found to do so, in every supported release, are reviewed in
``tests/versions/weight_places.json``.
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm_exl3.pack.metadata import architectures

__all__ = ["PLAIN_LAYERS", "wants_a_matrix"]

PLAIN_LAYERS: Mapping[str, str] = {
    "FalconForCausalLM": r"query_key_value",
    "RWForCausalLM": r"query_key_value",
    "BloomForCausalLM": r"query_key_value",
    "GPTNeoXForCausalLM": r"query_key_value",
    "LongcatFlashForCausalLM": r"kv_b_proj",
    "LongcatFlashNgramForCausalLM": r"kv_b_proj",
    "LongCatFlashMTPModel": r"kv_b_proj",
    "Dots3NoteForCausalLM": r"kv_b_proj",
    "Dots3NoteMTPModel": r"kv_b_proj",
    "DFlashLagunaForCausalLM": r"qkv_proj",
    "Gemma4DSparkModel": r"[kv]_proj",
    "DFlash2BeamDraftModel": r"qkv_proj",
    "MuseSparkDSparkModel": r"qkv_proj",
    "DeepseekV4ForCausalLM": r"wo_a|weights_proj",
    "DeepseekV4ForConditionalGeneration": r"wo_a|weights_proj|aligner\.w1",
    "DeepSeekV4MTPModel": r"wo_a|weights_proj",
    "DSparkDraftModel": r"wo_a|weights_proj",
    "DeepseekV41ForCausalLM": r"wo_a|wq_b|weights_proj|indexer\.wk|aligner\.w1",
    "DSparkV41DraftModel": r"wo_a|wq_b|weights_proj|indexer\.wk",
    "KimiK3ForConditionalGeneration": r"routed_expert_up_proj",
    "KimiK3MTPModel": r"routed_expert_up_proj",
    "FlintForCausalLM": r"qkv_proj",
    "Step5ForCausalLM": r"qkv_indexer_proj",
    "Step5ForConditionalGeneration": r"qkv_indexer_proj",
    "Step5MTP": r"qkv_indexer_proj",
}
"""Class name of ``config.json`` to the last components of its layers' names, as a regular expression."""


def wants_a_matrix(config: Mapping[str, Any], prefix: str) -> bool:
    """Whether vLLM's class reads or reorders the dense weight of this layer.

    Args:
        config: the pack's ``config.json``.
        prefix: the layer's name.
    """
    patterns = [PLAIN_LAYERS[name] for name in architectures(config) if name in PLAIN_LAYERS]
    return any(re.search(rf"(?:^|\.)(?:{pattern})$", prefix) for pattern in patterns)
