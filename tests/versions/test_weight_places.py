"""What vLLM's model code reads or changes of weights itself has been reviewed, in every supported release."""

import functools
import json
from pathlib import Path

import pytest
import vllm

from tests.versions.weight_places import places
from vllm_exl3.serving.plain_layers import PLAIN_LAYERS, wants_a_matrix

REVIEWED: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("weight_places.json").read_text())
"""What is done about a place, to the functions of that kind, to the expressions in each."""

VERDICTS = (
    "decoded",
    "experts",
    "heads",
    "no linear",
    "no weight",
    "other format",
    "own path",
    "reads device or dtype",
)
VERDICTS += ("refused", "reordered", "replaced", "routers", "stops")


@functools.cache
def installed() -> dict[str, list[str]]:
    return places(Path(vllm.__file__).parent)


def known() -> set[tuple[str, str]]:
    return {
        (where, code) for group in REVIEWED.values() for where, expressions in group.items() for code in expressions
    }


def test_every_place_is_reviewed() -> None:
    found = {(where, code) for where, codes in installed().items() for code in codes}
    new = sorted(found - known())
    assert not new, (
        f"{len(new)} places read or change weights and are not in weight_places.json: serve what they do, or refuse it "
        f"by name, then add them there: {new[:8]}"
    )
    assert len(found) > 250  # an empty search would find nothing new either


@pytest.mark.parametrize(
    "where",
    [
        "model_executor/models/llama4.py::Llama4ForCausalLM.permute_qk_weight_for_rotary",
        "model_executor/models/falcon.py::FalconModel.load_weights",
        "model_executor/models/bloom.py::BloomModel._repack_qkv",
        "model_executor/models/bailing_moe.py::BailingMoeForCausalLM._normalize_lm_head",
        "model_executor/models/k2_horizon.py::K2HorizonModel.load_weights",
        "model_executor/models/gemma4_dspark.py::Gemma4DSparkModel._build_context_kv_buffers",
    ],
)
def test_the_search_finds_what_was_wrong_once(where: str) -> None:
    assert installed().get(where)


SOURCE = """
class Model:
    def load_weights(self, weights):
        for name, loaded_weight in weights:
            if name.endswith(".q_proj.weight"):
                loaded_weight = loaded_weight.flip(0)
            if name.endswith(".k_proj.weight"):
                loaded_weight *= 2
            part = name.split(".")
    def forward(self, x):
        return x @ self.q_proj.weight.T + self.norm.weight
"""


def test_new_code_is_found(tmp_path: Path) -> None:
    file = tmp_path / "model_executor" / "models" / "new.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    assert places(tmp_path) == {
        "model_executor/models/new.py::Model.forward": ["self.q_proj.weight"],
        "model_executor/models/new.py::Model.load_weights": ["loaded_weight *= 2", "loaded_weight.flip(0)"],
    }


def test_every_verdict_is_one_of_a_few() -> None:
    assert [verdict for verdict in REVIEWED if not verdict.startswith(VERDICTS)] == []


@pytest.mark.parametrize(
    ("architecture", "prefix", "plain"),
    [
        ("FalconForCausalLM", "transformer.h.0.self_attention.query_key_value", True),
        ("FalconForCausalLM", "transformer.h.0.self_attention.dense", False),
        ("LlamaForCausalLM", "model.layers.0.self_attn.qkv_proj", False),
        ("DeepseekV41ForCausalLM", "model.layers.2.attn.indexer.wk", True),
        ("DeepseekV41ForCausalLM", "model.layers.2.attn.wk", False),
        ("KimiK3ForConditionalGeneration", "language_model.model.layers.1.mlp.routed_expert_up_proj", True),
        ("KimiLinearForCausalLM", "model.layers.0.self_attn.in_proj_qkvgfab", False),
        ("FlintForCausalLM", "model.layers.0.self_attn.qkv_proj", True),
        ("Step5ForCausalLM", "model.layers.0.self_attn.qkv_indexer_proj", True),
        ("Step5ForCausalLM", "model.layers.0.self_attn.qkv_proj", False),
    ],
)
def test_layers_whose_matrix_is_read(architecture: str, prefix: str, plain: bool) -> None:
    assert wants_a_matrix({"architectures": [architecture]}, prefix) is plain
    assert wants_a_matrix({"architectures": [architecture]}, "lm_head") is False
    assert all(pattern for pattern in PLAIN_LAYERS.values())
