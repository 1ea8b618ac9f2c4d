"""Tensors that a class of vLLM computes anew while loading: an EXL3 one is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_pack import Draft, linear
from vllm_exl3.pack import Pack
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.rewritten import refuse_rewritten

NORMALIZED = {"architectures": ["BailingMoeV2ForCausalLM"], "norm_head": True}


def opened(folder: Path, config: Mapping[str, Any], key: str) -> Pack:
    return Pack.open(Draft(linear(key, 128, 128, bits=4), dict(config)).write(folder / "pack"))


@pytest.mark.parametrize(
    ("config", "key", "what"),
    [
        (NORMALIZED, "lm_head", "normalizes the columns of the head"),
        (
            {"architectures": ["OpenAIPrivacyFilterForTokenClassification"]},
            "model.layers.0.mlp.experts.0.up_proj",
            "interleaves gate and up",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(tmp_path: Path, config: Mapping[str, Any], key: str, what: str) -> None:
    with pytest.raises(Exl3PackError, match=f"{key} in EXL3, .*{what}"):
        refuse_rewritten(opened(tmp_path, config, key))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**NORMALIZED, "norm_head": False}, "lm_head"),
        (NORMALIZED, "model.layers.0.mlp.down_proj"),
        ({"architectures": ["LlamaForCausalLM"], "norm_head": True}, "lm_head"),
    ],
)
def test_others_are_not(tmp_path: Path, config: Mapping[str, Any], key: str) -> None:
    refuse_rewritten(opened(tmp_path, config, key))
