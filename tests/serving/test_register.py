"""Registration, selection and life of the quantization config, without an engine."""

import contextlib
import copy
import importlib.util
import json
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

import vllm_exl3
from tests.serving.conftest import PACKS, Tensors
from vllm_exl3 import env
from vllm_exl3.env_unused import unused
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.names import NameResolver
from vllm_exl3.serving import register as register_module
from vllm_exl3.serving.config import Exl3Config

FOLDERS = (env.CACHE, env.METRICS_FOLDER)
PATHS = (*FOLDERS, env.EXPERTS_STATS)
NUMBERS = (
    env.NATIVE_MOE_MAX_ROWS,
    env.NATIVE_MOE_MAX_ROWS_BY_BITS[3],
    env.GROUPED_PREFILL_MAX_ROWS,
    env.FUSED_TEMP_ROWS,
    env.FAT_THRESHOLD,
    env.RECONSTRUCT_MB,
    env.NGRAM_CACHE_MIB,
)


def test_importing_the_package_loads_neither_torch_nor_vllm_nor_cuda() -> None:
    code = "import sys, vllm_exl3; assert not {'torch', 'vllm', 'cuda', 'numpy'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registering_twice_is_once() -> None:
    vllm_exl3.register()
    vllm_exl3.register()
    assert get_quantization_config("exl3") is Exl3Config


class _Entry:
    """An installed entry point of another distribution."""

    def __init__(self, name: str, value: str, distribution: str) -> None:
        self.name, self.value, self.dist = name, value, SimpleNamespace(name=distribution)


OWN = EntryPoint("exl3", "vllm_exl3:register", "vllm.general_plugins")


@pytest.mark.parametrize(
    ("entry", "allowed", "conflict"),
    [
        (_Entry("exl3", "other_exl3:register", "other-exl3"), None, ["other-exl3"]),
        (_Entry("quantpack", "vllm_quantpack:register", "vllm-quantpack"), None, ["vllm-quantpack"]),
        (_Entry("orca", "orcasaq2:register", "OrcaSAQ2"), None, ["OrcaSAQ2"]),
        (_Entry("vision", "v:register", "qwen38_exl3_vision"), None, ["qwen38_exl3_vision"]),
        (_Entry("flint", "f:register", "flint_vllm"), None, ["flint_vllm"]),
        (_Entry("spark", "s:register", "spark_vllm"), None, ["spark_vllm"]),
        (_Entry("quantpack", "vllm_quantpack:register", "vllm-quantpack"), "exl3", []),
        (_Entry("lora_resolver", "x:register", "vllm-lora"), None, []),
    ],
)
def test_other_plugins_that_serve_exl3_are_found(
    monkeypatch: pytest.MonkeyPatch, entry: _Entry, allowed: str | None, conflict: list[str]
) -> None:
    monkeypatch.setattr(register_module, "entry_points", lambda group: [OWN, entry])
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert register_module.conflicts() == conflict


def leave_the_extension_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "vllm_exl3_c" else find(name))


def install(*entries: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(register_module, "entry_points", lambda group: [OWN, *entries])


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (leave_the_extension_behind, r"vllm_exl3_c.*uninstall vllm_exl3_c.*VLLM_PLUGINS=exl3\."),
        (
            install(_Entry("quantpack", "q:register", "vllm-quantpack")),
            r"uninstall vllm-quantpack.*VLLM_PLUGINS=exl3\.",
        ),
        (install(_Entry("exl3", "o:register", "other-exl3")), r"uninstall other-exl3.*VLLM_PLUGINS=vllm_exl3\."),
    ],
)
def test_a_conflict_stops_with_one_message_and_both_remedies(
    monkeypatch: pytest.MonkeyPatch, present: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(register_module, "_registered", False)
    present(monkeypatch)
    with pytest.raises(RuntimeError, match=message) as error:
        register_module.register()
    monkeypatch.setenv("VLLM_PLUGINS", str(error.value).rpartition("VLLM_PLUGINS=")[2].rstrip("."))
    assert register_module.conflicts() == [], "the remedy that the message names does not help"


def test_vllm_gets_here_even_where_another_plugin_takes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.plugins import load_plugins_by_group

    project = tomllib.loads((PACKS.parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    ours = [EntryPoint(name, value, "vllm.general_plugins") for name, value in declared.items()]
    other = EntryPoint("exl3", "json:loads", "vllm.general_plugins")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [*ours, other])
    assert vllm_exl3.register in load_plugins_by_group("vllm.general_plugins").values()


@pytest.mark.parametrize(
    ("allowed", "registers"),
    [(None, False), ("quantpack", True), ("lora,quantpack", True), ("exl3,quantpack", False), ("quant", False)],
)
def test_the_earlier_plugin_s_name_leads_here_and_the_log_says_which_to_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: str | None, registers: bool
) -> None:
    called: list[None] = []
    monkeypatch.setattr(register_module, "register", lambda: called.append(None))
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    register_module.register_as_quantpack()
    assert bool(called) is registers
    said = f"set VLLM_PLUGINS={allowed.replace('quantpack', 'exl3')}" if registers else ""
    assert said in caplog.text and bool(caplog.text) is registers


def test_both_plugins_under_the_earlier_one_s_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "quantpack")
    monkeypatch.setattr(register_module, "_registered", False)
    install(_Entry("quantpack", "q:register", "vllm-quantpack"))(monkeypatch)
    with pytest.raises(RuntimeError, match="uninstall vllm-quantpack"):
        register_module.register_as_quantpack()


@pytest.mark.parametrize(
    ("declared", "claimed"),
    [
        ({"quant_method": "exl3"}, "exl3"),
        ({"quant_method": "EXL3"}, "exl3"),
        (SimpleNamespace(quant_method="exl3"), "exl3"),
        ({"quant_method": "exl2"}, None),
        ({"quant_method": "gptq", "bits": 4}, None),
        ({}, None),
        (None, None),
    ],
)
def test_only_exl3_declarations_are_claimed(declared: Any, claimed: str | None) -> None:
    assert Exl3Config.override_quantization_method(declared, None, hf_config=None, unknown=1) == claimed
    assert Exl3Config.override_quantization_method(declared, "exl3") == claimed


@pytest.mark.parametrize("other", ["fp8", "gptq", "bitsandbytes"])
def test_a_flag_that_names_another_method_is_refused_with_both_names(other: str) -> None:
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    with pytest.raises(ValueError, match=rf"(?s)config \(exl3\) does not match .* \({other}\)"):
        EngineArgs(model=str(PACKS / "llama_tied-3.0-mul1"), quantization=other, **options).create_engine_config()


def opened(name: str = "llama_tied-3.0-mul1") -> Exl3Config:
    config = Exl3Config({"quant_method": "exl3"})
    config.maybe_update_config(str(PACKS / name), hf_config=None, revision=None, unknown=1)
    return config


def test_a_pickled_config_is_small_and_opens_its_pack_again() -> None:
    data = pickle.dumps(opened())
    assert len(data) < 4096
    restored = pickle.loads(data)
    assert "lm_head" in restored.pack.linears
    assert restored.resolve("lm_head") is not None


def test_the_record_of_every_tensor_is_not_pickled() -> None:
    sidecar = json.loads((PACKS / "llama_tied-3.0-mul1" / "quantization_config.json").read_text())
    assert sidecar["tensor_storage"]
    config = Exl3Config.from_config(sidecar)
    assert config.raw == {key: value for key, value in sidecar.items() if key != "tensor_storage"}


@pytest.mark.parametrize(("last_rank", "attached"), [(True, ["lm_head"]), (False, [])])
def test_only_the_last_pipeline_stage_gives_its_embedding_the_head(
    monkeypatch: pytest.MonkeyPatch, last_rank: bool, attached: list[str]
) -> None:
    """A stage without the head builds none either; that must not be taken for a model class that has none."""
    group = SimpleNamespace(world_size=2, is_last_rank=last_rank, rank_in_group=int(last_rank))
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: group)
    monkeypatch.setattr(NameResolver, "raise_if_unmatched", lambda *_: None)
    heads: list[str] = []
    method = SimpleNamespace(attach_head=lambda layer, where, parts: heads.append(where))
    config = opened()
    head = config.pack.linears["lm_head"]
    layer = SimpleNamespace(embedding_dim=head.in_features, org_vocab_size=head.out_features)
    config._vocabulary.embeddings.append((layer, method))  # type: ignore[arg-type]
    mapper = config.get_checkpoint_weight_mapper()
    assert heads == attached
    wanted = "model.embed_tokens.trellis" if last_rank else "lm_head.trellis"
    map_name = getattr(mapper, "map_name", None) or mapper._map_name  # 0.30 has the latter only
    assert map_name("lm_head.trellis") == wanted


LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "built", "missed"),
    [
        (0, [0], None),
        (0, [], r"model\.layers\.0\."),
        (1, [1, "lm_head"], None),
        (1, [0, "lm_head"], r"model\.layers\.1\."),
        (1, [1], r"\(lm_head\)"),
    ],
)
def test_each_pipeline_stage_misses_its_own_layers_only(
    monkeypatch: pytest.MonkeyPatch, stage: int, built: list[int | str], missed: str | None
) -> None:
    group = SimpleNamespace(world_size=2, is_last_rank=stage == 1, rank_in_group=stage)
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: group)
    config = opened()
    for part in built:
        for prefix in [part] if isinstance(part, str) else [f"model.layers.{part}.{name}" for name in LAYER]:
            assert config.resolve(prefix) is not None
    with pytest.raises(Exl3PackError, match=missed) if missed else contextlib.nullcontext():
        config.verify_names()


@pytest.mark.parametrize("name", [variable.name for variable in env.VARIABLES if variable not in PATHS])
def test_a_value_that_is_not_taken_stops_before_the_pack_is_opened(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "no such choice")
    with pytest.raises(ValueError, match=f"{name}='no such choice': expected"):
        Exl3Config({}).maybe_update_config("/no/such/pack")


@pytest.mark.parametrize(
    ("name", "value", "stops"),
    [
        ("VLLM_EXL3_NATIVE_MOE_MAX_ROWS", "0", True),
        ("VLLM_EXL3_NATIVE_MOE_MAX_ROWS_K3", "0", True),
        ("VLLM_EXL3_NATIVE_MOE_MAX_ROWS", "8", False),
        ("VLLM_BATCH_INVARIANT", "1", True),
        ("VLLM_BATCH_INVARIANT", "0", False),
    ],
)
def test_experts_without_either_path_stop_too(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, stops: bool
) -> None:
    monkeypatch.setenv(name, value)
    env.validate()
    monkeypatch.setenv("VLLM_EXL3_GROUPED_PREFILL", "0")
    with pytest.raises(ValueError, match=f"GROUPED_PREFILL=0 .*{name}={value}") if stops else contextlib.nullcontext():
        env.validate()


@pytest.mark.parametrize(
    ("settings", "ineffective"),
    [
        ({}, []),
        ({"GROUPED_PREFILL": "0", "NATIVE_MOE_MAX_ROWS_K4": "8"}, ["NATIVE_MOE_MAX_ROWS_K4=8"]),
        ({"GROUPED_PREFILL": "0", "FAT_THRESHOLD": "9", "FUSED_TEMP_ROWS": "9"}, ["FAT_THRESHOLD=9"]),
        ({"GROUPED_PREFILL": "1", "NATIVE_MOE_MAX_ROWS": "8", "FAT_THRESHOLD": "9"}, []),
        ({"MOE_KERNEL": "reference", "GROUPED_PREFILL": "0"}, ["GROUPED_PREFILL=0"]),
        ({"MOE_KERNEL": "Native", "GROUPED_PREFILL_MAX_ROWS": "64"}, []),
        ({"RECONSTRUCT_MB": "1"}, ["RECONSTRUCT_MB=1"]),
        ({"RECONSTRUCT_MB": "1", "LINEAR_KERNEL": "reconstruct"}, []),
        ({"INT4_KV": "no", "INT4_TILES": "auto", "INT4_FA_PREFILL": "0"}, ["INT4_FA_PREFILL=0"]),
        ({"NGRAM_TABLE": "pinned", "NGRAM_CACHE_MIB": "1"}, ["NGRAM_CACHE_MIB=1"]),
        ({"NGRAM_TABLE": "disk", "NGRAM_CACHE_MIB": "1"}, []),
    ],
)
def test_settings_that_another_rules_out_are_named(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], ineffective: list[str]
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"VLLM_EXL3_{name}", value)
    found = unused()
    assert [sentence.partition(" has no effect: ")[0] for sentence in found] == [f"VLLM_EXL3_{n}" for n in ineffective]


def test_of_two_names_of_one_setting_the_ineffective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_INT4_KV", "1")
    monkeypatch.setenv("VLLM_QUANTPACK_INT4_KV", "1")
    assert unused() == []
    monkeypatch.setenv("VLLM_QUANTPACK_INT4_KV", "0")
    assert env.INT4_KV.get()
    (sentence,) = unused()
    assert sentence == ("VLLM_QUANTPACK_INT4_KV=0 has no effect: VLLM_EXL3_INT4_KV=1, another name of it, counts")


@pytest.mark.parametrize(("text", "asked"), [("", False), ("0", False), ("1", True), ("2", True), ("true", True)])
def test_batch_invariance_is_asked_for_as_vllm_reads_it(
    monkeypatch: pytest.MonkeyPatch, text: str, asked: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", text)
    assert env.batch_invariant() is asked
    monkeypatch.setenv("VLLM_EXL3_NATIVE_MOE_MAX_ROWS", "8")
    assert bool(unused()) is asked


@pytest.mark.parametrize("variable", FOLDERS, ids=lambda variable: variable.name)
@pytest.mark.parametrize("value", ["{file}", "{file}/below", "~no-such-user/folder"])
def test_a_folder_that_cannot_be_one_stops_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: env.Variable[str], value: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(variable.name, value.format(file=file))
    with pytest.raises(ValueError, match=f"{variable.name}='.*': expected"):
        Exl3Config({}).maybe_update_config("/no/such/pack")
    monkeypatch.setenv(variable.name, str(tmp_path / "not" / "yet"))
    assert variable.get() == str(tmp_path / "not" / "yet")


@pytest.mark.parametrize("value", ["-1", "1.5", str(2**31), "9" * 5000, "²"])
@pytest.mark.parametrize("variable", NUMBERS, ids=lambda variable: variable.name)
def test_a_number_that_kernels_cannot_take_stops_too(
    monkeypatch: pytest.MonkeyPatch, variable: env.Variable[int], value: str
) -> None:
    monkeypatch.setenv(variable.name, value)
    with pytest.raises(ValueError, match=f"{variable.name}='.*': expected a whole number from") as caught:
        env.validate()
    assert len(str(caught.value)) < 200


def test_a_copy_shares_no_state_with_the_original() -> None:
    config = opened()
    config.resolve("lm_head")
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    twin = copy.deepcopy(config)
    assert not twin.claimed and not twin.packed_modules_mapping
    assert twin.report is not config.report
    assert twin.source == config.source


def test_renames_that_arrive_late_keep_earlier_claims() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    config = opened()
    config.resolve("lm_head")
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert config.resolve("language_model.model.layers.0.self_attn.o_proj") is not None
    assert {"lm_head", "model.layers.0.self_attn.o_proj"} <= config.claimed


def test_activation_dtypes_are_the_three_that_the_ops_take() -> None:
    assert set(Exl3Config.get_supported_act_dtypes()) == {torch.float16, torch.bfloat16, torch.float32}


def test_the_embedding_hook_leaves_the_stock_class_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_exl3.register()
    monkeypatch.setattr("vllm.model_executor.layers.vocab_parallel_embedding.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(
        "vllm.model_executor.layers.vocab_parallel_embedding.get_tensor_model_parallel_world_size", lambda: 1
    )
    layer = VocabParallelEmbedding(128, 64, prefix="model.embed_tokens")
    assert type(layer) is VocabParallelEmbedding
    assert type(layer.quant_method).__name__ == "UnquantizedEmbeddingMethod"


def slice_every_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name and ".down_proj." in name]:
        tensors[name.replace("down_proj.", "down_proj.slice.0.")] = tensors.pop(name)


def test_what_is_not_served_yet_is_refused_before_the_model_is_built(variant: Callable[..., Path]) -> None:
    config = Exl3Config.from_config({"quant_method": "exl3"})
    with pytest.raises(Exl3PackError, match="sliced experts"):
        config.maybe_update_config(str(variant("qwen3_moe-3.0-mul1", slice_every_expert)))


def drop_declaration(config: dict[str, Any]) -> None:
    config.pop("quantization_config")


def test_a_pack_is_recognised_without_a_flag_and_with_one(variant: Callable[..., Path]) -> None:
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    found = EngineArgs(model=str(PACKS / "llama_tied-3.0-mul1"), **options).create_engine_config()
    assert isinstance(found.quant_config, Exl3Config)
    undeclared = variant("llama_tied-3.0-mul1", config=drop_declaration)
    forced = EngineArgs(model=str(undeclared), quantization="exl3", **options).create_engine_config()
    assert isinstance(forced.quant_config, Exl3Config)


def test_a_damaged_pack_is_refused_while_the_engine_is_configured(variant: Callable[..., Path]) -> None:
    folder = variant("llama_tied-3.0-mul1")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exl3PackError) as error:
        EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64
        ).create_engine_config()
    assert "model.safetensors" in error.value.where and "bytes" in error.value.found
