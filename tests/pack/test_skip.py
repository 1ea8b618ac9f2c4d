"""Every stored byte is accounted for: served, skipped under a named rule, or unknown."""

from pathlib import Path

import numpy as np
import pytest

from tests.tiny_pack import Draft, llama
from vllm_exl3.pack import Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.skip import RULES, Accounts, classify, draft_layers, main_layers


def _classify(draft: Draft, folder: Path, **options: bool) -> Accounts:
    draft.sidecar = None
    pack = Pack.open(draft.write(folder))
    accounts = classify(pack, **options)
    skipped = sum(tensor.nbytes for tensors in accounts.skipped.values() for tensor in tensors)
    unknown = sum(tensor.nbytes for tensor in accounts.unknown)
    assert sum(accounts.served.values()) + skipped + unknown == pack.nbytes, "no byte is lost"
    return accounts


def test_golden_packs_are_served_whole(golden_pack: Path) -> None:
    pack = Pack.open(golden_pack)
    accounts = classify(pack)
    assert sum(accounts.served.values()) == pack.nbytes
    assert not accounts.skipped and not accounts.unknown


def _fillers(draft: Draft) -> None:
    draft.tensors["__align_pad__.model-00001.0"] = ("U8", np.zeros(100))


def _mtp_block(draft: Draft) -> None:
    draft.add_linear("mtp.layers.0.mlp.up_proj", 128, 128)
    draft.tensors["mtp.fc.weight"] = ("BF16", np.zeros((4, 4)))


def _mtp_after_the_stack(draft: Draft) -> None:
    draft.config["num_nextn_predict_layers"] = 1
    draft.add_linear("model.layers.2.mlp.up_proj", 128, 128)
    draft.tensors["model.layers.2.eh_proj.weight"] = ("BF16", np.zeros((4, 4)))


def _duplicated_vision(draft: Draft) -> None:
    draft.tensors["model.visual.blocks.0.attn.qkv.weight"] = ("BF16", np.zeros((12, 4)))
    for name in "qkv":
        draft.add_linear(f"model.visual.blocks.0.attn.{name}", 128, 128)


def _dense_copy(draft: Draft) -> None:
    draft.tensors["model.layers.0.mlp.up_proj.weight"] = ("BF16", np.zeros((256, 128)))


def _rotary(draft: Draft) -> None:
    draft.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.zeros(32))


SKIPPED = {
    "alignment filler": [(_fillers, 1)],
    "MTP without speculation": [(_mtp_block, 5), (_mtp_after_the_stack, 5)],
    "duplicated vision attention": [(_duplicated_vision, 12)],
    "dense copy of an EXL3 module": [(_dense_copy, 1)],
    "rotary buffer": [(_rotary, 1)],
}


def test_every_rule_has_a_test_and_a_reason() -> None:
    assert {rule.name for rule in RULES} == set(SKIPPED)
    assert all(rule.reason for rule in RULES)


@pytest.mark.parametrize(
    ("rule", "add", "count"), [(rule, add, count) for rule, cases in SKIPPED.items() for add, count in cases]
)
def test_rule_skips_its_tensors_and_no_others(rule: str, add, count: int, tmp_path: Path) -> None:
    draft = llama()
    add(draft)
    accounts = _classify(draft, tmp_path)
    assert {name: len(tensors) for name, tensors in accounts.skipped.items()} == {rule: count}
    assert not accounts.unknown


def test_speculation_takes_the_mtp_tensors(tmp_path: Path) -> None:
    draft = llama()
    _mtp_block(draft)
    _fillers(draft)
    accounts = _classify(draft, tmp_path, speculation=True)
    assert set(accounts.skipped) == {"alignment filler"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.mlp.gate_proj.qweight", "U8"),
        ("model.layers.0.self_attn.new_thing.weight_scale", "F8_E4M3"),
        ("model.layers.0.mlp.up_proj.zeros", "F16"),
        ("something.suh_old", "U8"),
    ],
)
def test_what_nobody_knows_is_unknown_and_warned_of(name: str, dtype: str, tmp_path: Path) -> None:
    draft = llama()
    draft.tensors[name] = (dtype, np.zeros(10))
    accounts = _classify(draft, tmp_path)
    assert [tensor.name for tensor in accounts.unknown] == [name]
    (warning,) = check(Pack.open(tmp_path))
    assert name in str(warning)


def test_declared_source_format_is_a_class_of_its_own(tmp_path: Path) -> None:
    draft = llama()
    draft.tensors["model.layers.0.self_attn.gate.weight"] = ("F8_E4M3", np.zeros((8, 128)))
    draft.config["quantization_config"]["non_routed_quantization"] = {"quant_method": "fp8"}
    accounts = _classify(draft, tmp_path)
    assert accounts.served["fp8 (declared source format)"] == 8 * 128 and not accounts.unknown


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 3}, 3),
        ({"text_config": {"num_hidden_layers": 4}, "num_hidden_layers": 3}, 4),
        ({"llm_config": {"num_hidden_layers": 5}}, 5),
        ({}, 0),
        ({"text_config": None, "num_hidden_layers": "many"}, 0),
    ],
)
def test_main_layers(config: dict, layers: int) -> None:
    assert main_layers(config) == layers


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_nextn_predict_layers": 1}, 1),
        ({"text_config": {"mtp_num_hidden_layers": 2}}, 2),
        ({"num_hidden_layers": 3}, 0),
        ({"num_nextn_predict_layers": None}, 0),
    ],
)
def test_draft_layers_are_those_that_the_config_declares(config: dict, layers: int) -> None:
    assert draft_layers(config) == layers


def test_a_layer_beyond_the_stack_is_no_draft_without_a_declaration(tmp_path: Path) -> None:
    draft = llama()
    draft.add_linear("model.layers.2.mlp.up_proj", 128, 128)
    assert not _classify(draft, tmp_path).skipped
