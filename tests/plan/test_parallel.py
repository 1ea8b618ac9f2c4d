"""Legal parallel degrees of a pack, and what is named where one is not legal."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_pack import Draft
from vllm_exl3.pack import Pack
from vllm_exl3.plan.parallel import DEGREES, expert_parallel, tensor_parallel
from vllm_exl3.plan.shapes import input_width, output_width


def _padded(width: int) -> int:
    return -(-width // 128) * 128


def _pack(folder: Path, config: dict[str, Any], *, mlp: int = 512, experts: int = 0) -> Pack:
    draft = Draft({}, {"num_hidden_layers": 1, "head_dim": 64, "intermediate_size": mlp, **config})
    draft.add_linear("model.layers.0.self_attn.o_proj", _padded(64 * config["num_attention_heads"]), 128, bits=1)
    draft.add_linear("model.layers.0.mlp.down_proj", _padded(mlp), 128, bits=1)
    for expert in range(experts):
        width = _padded(config["moe_intermediate_size"])
        draft.add_linear(f"model.layers.0.mlp.experts.{expert}.up_proj", 128, width, bits=1)
        draft.add_linear(f"model.layers.0.mlp.experts.{expert}.down_proj", width, 128, bits=1)
    return Pack.open(draft.write(folder))


def _legal(degrees: list[Any]) -> list[int]:
    return [degree.degree for degree in degrees if degree.blocker is None]


HEADS_8 = {"num_attention_heads": 8, "num_key_value_heads": 8}

DENSE = [
    # config, MLP width, legal degrees, what the first illegal one says
    (HEADS_8, 512, [1, 2, 4, 8], "8 heads do not divide by 3"),
    ({"num_attention_heads": 9, "num_key_value_heads": 3}, 1536, [1, 3], "9 heads do not divide by 2"),
    ({"num_attention_heads": 8, "num_key_value_heads": 2}, 512, [1, 2, 4, 8], "8 heads do not divide by 3"),
    ({"num_attention_heads": 24, "num_key_value_heads": 4}, 768, [1, 2, 4, 8], "4 key/value heads"),
    ({"num_attention_heads": 24, "num_key_value_heads": 4, "kv_lora_rank": 512}, 768, [1, 2, 3, 4, 6, 8], "24 heads"),
    (HEADS_8, 514, [1, 2], "8 heads"),
    ({**HEADS_8, "linear_num_key_heads": 6}, 512, [1, 2], "8 heads"),
    ({"num_attention_heads": 48, "num_key_value_heads": 48}, 2304, list(DEGREES), None),
]


@pytest.mark.parametrize(("config", "mlp", "legal", "blocker"), DENSE)
def test_tensor_parallel(
    config: dict[str, Any], mlp: int, legal: list[int], blocker: str | None, tmp_path: Path
) -> None:
    degrees = tensor_parallel(_pack(tmp_path, config, mlp=mlp))
    assert _legal(degrees) == legal
    blockers = [degree.blocker for degree in degrees if degree.blocker]
    assert blockers[0].find(blocker) >= 0 if blocker else not blockers


def test_width_that_does_not_divide_names_the_layer(tmp_path: Path) -> None:
    degrees = tensor_parallel(_pack(tmp_path, HEADS_8, mlp=514), [4])
    assert degrees[0].blocker == "model.layers.0.mlp.down_proj: 514 inputs do not divide by 4"


def test_shared_blocks_are_legal_and_noted(tmp_path: Path) -> None:
    (degree,) = tensor_parallel(_pack(tmp_path, HEADS_8, mlp=320), [2])
    assert degree.blocker is None
    assert degree.note == "model.layers.0.mlp.down_proj: 160 inputs a rank, edge blocks stored twice"
    (even,) = tensor_parallel(_pack(tmp_path, HEADS_8, mlp=512), [2])
    assert even.note is None


def test_experts_need_a_block_per_rank_or_whole_experts(tmp_path: Path) -> None:
    pack = _pack(tmp_path, {**HEADS_8, "moe_intermediate_size": 256}, experts=4)
    split = {degree.degree: degree.blocker for degree in tensor_parallel(pack)}
    assert split[2] is None
    assert split[4] == "model.layers.0.mlp.experts.0.down_proj: 2 blocks of 128 channels for 4 ranks"
    whole = {degree.degree: degree.blocker for degree in expert_parallel(pack)}
    assert whole[4] is None
    assert whole[8] == "model.layers.0.mlp.experts: 4 experts for 8 ranks"
    assert whole[3] == "attention: 8 heads do not divide by 3"


def test_expert_width_must_divide_too(tmp_path: Path) -> None:
    pack = _pack(tmp_path, {**HEADS_8, "moe_intermediate_size": 770}, experts=1)
    (degree,) = tensor_parallel(pack, [4])
    assert degree.blocker == "model.layers.0.mlp.experts.0.down_proj: 770 inputs do not divide by 4"


def test_pack_without_experts_has_no_expert_parallelism(tmp_path: Path) -> None:
    assert expert_parallel(_pack(tmp_path, HEADS_8)) == []


def test_draft_layers_and_towers_do_not_count(tmp_path: Path) -> None:
    draft = Draft({}, {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 512})
    for key in ("mtp.layers.0.mlp.down_proj", "model.visual.blocks.0.mlp.fc2"):
        draft.add_linear(key, 384, 128)
    draft.config["intermediate_size"] = 333
    (degree,) = tensor_parallel(Pack.open(draft.write(tmp_path)), [2])
    assert degree.blocker is None


WIDTHS = [
    # leaf, stored width, config, real width
    ("down_proj", 640, {"intermediate_size": 576}, 576),
    ("down_proj", 640, {"intermediate_size": 640}, 640),
    ("down_proj", 768, {"intermediate_size": 2112, "moe_intermediate_size": 704}, 704),
    ("down_proj", 640, {"intermediate_size": 576, "moe_intermediate_size": 600}, 640),  # either: no guess
    ("down_proj", 640, {}, 640),
    ("o_proj", 640, {"num_attention_heads": 9, "head_dim": 64, "hidden_size": 576}, 576),
    ("o_proj", 640, {"num_attention_heads": 9, "hidden_size": 576}, 576),
    ("o_proj", 2048, {"num_attention_heads": 16, "head_dim": 192, "v_head_dim": 128}, 2048),
    ("q_proj", 640, {"hidden_size": 576}, 576),
    ("q_proj", 2944, {"text_config": {"hidden_size": 2880}}, 2944),
    ("lm_head", 640, {"hidden_size": 576}, 576),
]


@pytest.mark.parametrize(("leaf", "stored", "config", "real"), WIDTHS)
def test_inputs_before_padding(leaf: str, stored: int, config: dict[str, Any], real: int) -> None:
    if "text_config" in config:
        real = config["text_config"]["hidden_size"]
    assert input_width(leaf, stored, config) == real


@pytest.mark.parametrize(
    ("leaf", "stored", "config", "real"),
    [
        ("lm_head", 49280, {"vocab_size": 49152}, 49280),
        ("lm_head", 152064, {"vocab_size": 151936}, 152064),
        ("lm_head", 151936, {"vocab_size": 151936}, 151936),
        ("lm_head", 128256, {"vocab_size": 128256}, 128256),
        ("lm_head", 49280, {"vocab_size": 49200}, 49200),
        ("k_proj", 256, {"num_key_value_heads": 3, "head_dim": 64}, 192),
        ("gate_proj", 4352, {"intermediate_size": 4304}, 4304),
        ("up_proj", 11008, {"intermediate_size": 10944}, 10944),
        ("o_proj", 2944, {"hidden_size": 2880}, 2880),
    ],
)
def test_outputs_before_padding(leaf: str, stored: int, config: dict[str, Any], real: int) -> None:
    assert output_width(leaf, stored, config) == real
