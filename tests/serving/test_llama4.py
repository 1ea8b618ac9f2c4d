"""Llama 4's order of rows: the one that vLLM's own loader gives q and k, whose tensors it knows by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.llama4 import Llama4ForCausalLM

from vllm_exl3.serving.models.llama4 import pairs_to_halves, rotary_heads

HEAD, HEADS, KV_HEADS = 32, 4, 2
TEXT = {"hidden_size": 128, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}


def config(*, nested: bool, architecture: str) -> dict[str, Any]:
    root: dict[str, Any] = {"architectures": [architecture]}
    return {**root, "text_config": TEXT} if nested else {**root, **TEXT}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_outputs_are_in_the_order_of_vllms_rows(name: str, nested: bool) -> None:
    architecture = "Llama4ForConditionalGeneration" if nested else "Llama4ForCausalLM"
    key = f"{'language_model.' if nested else ''}model.layers.1.self_attn.{name}"
    rows = HEAD * {"q_proj": HEADS, "o_proj": HEADS}.get(name, KV_HEADS)
    weight, inputs = torch.randn(rows, 16), torch.randn(3, 16)
    model = SimpleNamespace(config=SimpleNamespace(**TEXT))
    _, reordered = Llama4ForCausalLM.permute_qk_weight_for_rotary(model, f"{key}.weight", weight.clone())
    heads = rotary_heads(config(nested=nested, architecture=architecture), key)
    outputs = inputs @ weight.T
    found = pairs_to_halves(outputs, rows // heads) if heads else outputs
    torch.testing.assert_close(found, inputs @ reordered.T)


def test_other_families_and_the_vision_tower_keep_their_order() -> None:
    assert rotary_heads(config(nested=False, architecture="LlamaForCausalLM"), "model.layers.0.self_attn.q_proj") == 0
    mine = config(nested=True, architecture="Llama4ForConditionalGeneration")
    assert rotary_heads(mine, "vision_model.model.layers.0.self_attn.q_proj") == 0
    assert rotary_heads(mine, "language_model.model.layers.0.self_attn.q_proj") == HEADS
