"""Metadata is shown and compared, and never decides how a tensor is decoded."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_pack import llama
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.metadata import (
    declared_blocks,
    ledger_entries,
    merge_blocks,
    sidecar_head,
    text_config,
    text_configs,
)
from vllm_exl3.pack.skip import draft_layers, main_layers
from vllm_exl3.pack.spelling import keys_are_values

INFORMATIONAL, COMPARED, DELEGATED, REFUSED = "informational", "compared", "delegated", "refused"
"""Shown only; compared with the headers, which win; left to whoever serves the layers that are not EXL3; a fault."""

KEYS: list[tuple[str, Any, str, str]] = [
    # key of quantization_config, a value that does not fit this pack, treatment, what the message shows
    ("quant_method", "EXL3", INFORMATIONAL, ""),
    ("quant_method", "gptq", REFUSED, "gptq"),
    ("version", "0.5.0+fork", INFORMATIONAL, ""),
    ("bits", 4, COMPARED, "bits 4 (headers: 3.00 on average)"),
    ("bits", 3.05, INFORMATIONAL, ""),
    ("head_bits", 5, COMPARED, "head_bits 5 (headers: 6)"),
    ("head_bits", 16, COMPARED, "head_bits 16 (headers: 6)"),
    ("mtp_bits", 4, INFORMATIONAL, ""),
    ("vision_bits", 4, INFORMATIONAL, ""),
    ("calibration", {"rows": 1, "cols": 1}, INFORMATIONAL, ""),
    ("out_scales", "never", INFORMATIONAL, ""),
    ("codebook", "mcg", COMPARED, "codebook mcg (headers: mul1)"),
    ("codebook", "3inst", COMPARED, "codebook 3inst (headers: mul1)"),
    ("original_quantization_config", {"quant_method": "fp8"}, INFORMATIONAL, ""),
    ("scope", "native_all_linears", INFORMATIONAL, ""),
    ("scope", "glm53_routed_experts_only", INFORMATIONAL, ""),
    ("layer_bits", {"0": 4}, COMPARED, "layer_bits 0: 4 (headers: 3)"),
    ("layer_bits", {"0": 3, "7": 2}, INFORMATIONAL, ""),
    ("non_routed_exl3", {"codebook": "mcg"}, COMPARED, "non_routed_exl3.codebook mcg (headers: mul1)"),
    ("non_routed_exl3", {"bits": 5, "modules": ["q_proj"], "layer_bits": {"q_proj": 5}}, INFORMATIONAL, ""),
    ("non_routed_exl3", {"layers": {"model.layers.0.self_attn.qkv_proj": {"bits": 4}}}, COMPARED,
     "non_routed_exl3.layers model.layers.0.self_attn.qkv_proj: 4 (headers: 3)"),
    ("non_routed_exl3", {"layers": {"model.layers.0.self_attn.o_proj": {"bits": 4, "bf16_shards": [1]}}}, COMPARED,
     "non_routed_exl3.layers model.layers.0.self_attn.o_proj: 4 (headers: 3)"),
    ("non_routed_exl3", {"layers": {"language_model.model.layers.9.gone": {"bits": 4}}}, INFORMATIONAL, ""),
    ("non_routed_quantization", {"quant_method": "fp8", "weight_block_size": [128, 128]}, DELEGATED, ""),
    ("non_routed_dtype_policy", "bf16_as_stored", DELEGATED, ""),
    ("mtp_experts", "source", DELEGATED, ""),
    ("mtp_experts_start_layer", 40, DELEGATED, ""),
    ("mtp_expert_dtype", "fp4", DELEGATED, ""),
    ("ngram_embedding", {"bits": 4, "num_shards": 128}, COMPARED, "ngram_embedding.bits 4 (headers: 5)"),
    ("native_quantization_config", {"bits": 3.0}, INFORMATIONAL, ""),
    ("derived_from_headers", True, INFORMATIONAL, ""),
    ("a_key_of_the_future", {"x": [1]}, INFORMATIONAL, ""),
]  # fmt: skip
"""Every key that exllamav3 or the earlier plugins write or read. ``tensor_storage`` is tested with the bad packs."""


def _pack(folder: Path, **declared: Any) -> Path:
    """A small pack with experts in layer 0 and an n-gram table, so that every key has something to disagree with."""
    draft = llama()
    draft.config["num_experts"] = 1
    for role in ("gate_proj", "up_proj", "down_proj"):
        draft.add_linear(f"model.layers.0.mlp.experts.0.{role}", 128, 128)
    draft.tensors["model.ngram.trellis"] = ("I16", np.zeros((4, 51)))
    draft.tensors["model.ngram.head_bias"] = ("F16", np.ones((2, 160)))
    draft.config["quantization_config"].update(declared)
    return draft.write(folder)


@pytest.mark.parametrize(("key", "value", "treatment", "message"), KEYS)
def test_each_key_is_treated_as_stated(key: str, value: Any, treatment: str, message: str, tmp_path: Path) -> None:
    plain = Pack.open(_pack(tmp_path / "plain"))
    assert check(plain) == []
    pack = Pack.open(_pack(tmp_path / "changed", **{key: value}))
    assert dict(pack.linears) == dict(plain.linears), "metadata must not change what is decoded"
    assert pack.quantization[key] == value
    if treatment == REFUSED:
        with pytest.raises(Exl3PackError, match=message):
            check(pack)
        return
    warnings = [str(warning) for warning in check(pack)]
    if treatment in (INFORMATIONAL, DELEGATED):
        assert warnings == []
    else:
        assert len(warnings) == 1 and message in warnings[0]


def test_all_disagreements_make_one_warning(tmp_path: Path) -> None:
    pack = Pack.open(_pack(tmp_path, bits=5, head_bits=8, codebook="mcg", layer_bits={"0": 2}))
    (warning,) = check(pack)
    for part in ("bits 5", "head_bits 8", "codebook mcg", "layer_bits 0: 2"):
        assert part in str(warning)


def test_pack_rewritten_for_another_plugin_opens_like_the_original(tmp_path: Path) -> None:
    original = llama().shard(2)
    rewritten = copy.deepcopy(original)
    rewritten.config["quantization_config"] = {
        "quant_method": "exl3",
        "bits": 3,
        "codebook": "mul1",
        "head_bits": 6,
        "scope": "native_all_linears",
        "layer_bits": {"0": 3, "1": 3},
        "non_routed_exl3": {
            "codebook": "mul1",
            "bits": 3,
            "modules": ["q_proj", "o_proj"],
            "layers": {
                "model.layers.0.self_attn.qkv_proj": {"bits": 3},
                "language_model.model.layers.0.self_attn.qkv_proj": {"bits": 3},
                "lm_head": {"bits": 6},
            },
        },
        "native_quantization_config": original.config["quantization_config"],
        "derived_from_headers": True,
    }
    rewritten.after = lambda folder: (
        [(folder / f"{name}.native").write_text("{}") for name in ("config.json", "model.safetensors.index.json")]
        and None
    )
    first = Pack.open(original.write(tmp_path / "original"))
    second = Pack.open(rewritten.write(tmp_path / "rewritten"))
    assert check(first) == check(second) == []
    assert dict(first.linears) == dict(second.linears)
    assert dict(first.tensors) == dict(second.tensors)


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({}, []),
        ({"quantization_config": {"bits": 3}}, ["quantization_config"]),
        ({"text_config": {"quantization_config": {"bits": 3}}}, ["text_config.quantization_config"]),
        ({"llm_config": {"quantization_config": {"bits": 3}}}, ["llm_config.quantization_config"]),
        ({"vision_config": {"quantization_config": {"bits": 3}}}, []),
        ({"quantization_config": None, "text_config": None}, []),
        ({"quantization_config": {}, "text_config": {"quantization_config": {}}},
         ["quantization_config", "text_config.quantization_config"]),
    ],
)  # fmt: skip
def test_blocks_are_found_at_the_root_and_in_the_text_config(config: dict[str, Any], places: list[str]) -> None:
    assert [place for place, _ in declared_blocks(config)] == places


def test_config_json_wins_over_the_sidecar_and_the_ledger_stays_out() -> None:
    config = {"quantization_config": {"bits": 3}, "text_config": {"quantization_config": {"bits": 2, "head_bits": 6}}}
    merged = merge_blocks(config, {"bits": 4, "codebook": "mcg", "tensor_storage": {}})
    assert merged == {"bits": 3, "head_bits": 6, "codebook": "mcg"}


def test_missing_declaration_is_a_warning_with_the_way_out(tmp_path: Path) -> None:
    draft = llama()
    del draft.config["quantization_config"]
    pack = Pack.open(draft.write(tmp_path))
    (warning,) = check(pack)
    assert "--quantization exl3" in str(warning)
    assert pack.quantization["head_bits"] == 6, "taken from quantization_config.json"


def test_pack_without_any_metadata_still_opens(tmp_path: Path) -> None:
    draft = llama()
    draft.sidecar = None
    draft.config = None
    pack = Pack.open(draft.write(tmp_path))
    assert len(pack.linears) == 15
    assert pack.quantization == {}


def test_modules_missing_from_the_ledger_are_no_matter(tmp_path: Path) -> None:
    draft = llama()
    for key in list(draft.sidecar["tensor_storage"])[::2]:
        del draft.sidecar["tensor_storage"][key]
    assert check(Pack.open(draft.write(tmp_path))) == []


def test_ledger_entries_without_tensors_are_a_warning(tmp_path: Path) -> None:
    draft = llama()
    draft.sidecar["tensor_storage"]["mtp.fc"] = {"stored_tensors": {"mtp.fc.weight": {"shape": [1]}}}
    (warning,) = check(Pack.open(draft.write(tmp_path)))
    assert "mtp.fc.weight" in str(warning)


_SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(
    before=st.dictionaries(st.text(max_size=6), _JSON, max_size=3),
    storage=st.dictionaries(st.text(max_size=6), st.dictionaries(st.text(max_size=6), _JSON, max_size=3), max_size=4),
    after=st.dictionaries(st.text(max_size=6), _JSON, max_size=3),
    indent=st.sampled_from([None, 1, 4]),
)
def test_streaming_reads_what_a_whole_parse_reads(
    before: dict[str, Any], storage: dict[str, Any], after: dict[str, Any], indent: int | None
) -> None:
    after = {key: value for key, value in after.items() if key not in before and key != "tensor_storage"}
    before.pop("tensor_storage", None)
    text = json.dumps({**before, "tensor_storage": storage, **after}, indent=indent)
    assert dict(ledger_entries(text, "x")) == storage
    head = sidecar_head(text, "x")
    assert head.pop("tensor_storage") is None
    assert head == {**before, **after}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tensor_storage": [1]}', '{"tensor_storage": {"a": {}', '{"a" 1}'])
def test_broken_sidecar_names_the_file(text: str) -> None:
    with pytest.raises(Exl3PackError) as caught:
        sidecar_head(text, "quantization_config.json in somewhere")
    assert "quantization_config.json" in caught.value.where


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_language_model_is_described_in_one_of_several_places(name: str) -> None:
    inner = {"hidden_size": 2, "num_hidden_layers": 3, "mtp_num_hidden_layers": 1, "attention_k_eq_v": True}
    config = {"hidden_size": 1, "num_hidden_layers": 9, name: inner, "vision_config": {"hidden_size": 7}}
    assert text_config(config) is inner
    assert text_configs(config) == [inner, config]
    assert (main_layers(config), draft_layers(config), keys_are_values(config)) == (3, 1, True)


@pytest.mark.parametrize("nested", [{}, {"text_config": {}}, {"text_config": None}, {"text_config": "x"}])
def test_without_a_nested_description_the_root_counts(nested: dict[str, Any]) -> None:
    config = {"hidden_size": 1, "num_hidden_layers": 9, **nested}
    assert text_config(config) is config
    assert (main_layers(config), draft_layers(config), keys_are_values(config)) == (9, 0, False)
