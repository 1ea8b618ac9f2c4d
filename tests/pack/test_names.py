"""vLLM module prefixes against checkpoint names: renames, fusions, wrappers, MTP, experts, leftovers."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_pack import Draft, linear, llama
from vllm_exl3.pack import Exl3PackError, NameResolver, Pack
from vllm_exl3.pack.spelling import renamed

LLAMA = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PHI3 = {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_up_proj"]}
QWEN_NEXT = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}

MakePack = Callable[..., Pack]


@pytest.fixture
def pack_of(tmp_path: Path) -> MakePack:
    """Opens a pack that holds just the given linears (and dense weights) beside nothing else."""

    def make(*keys: str, dense: tuple[str, ...] = (), config: dict | None = None) -> Pack:
        draft = Draft({}, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, **(config or {})})
        for key in keys:
            draft.add_linear(key, 128, 128)
        for key in dense:
            draft.tensors[f"{key}.weight"] = ("F16", np.ones((128, 128)))
        return Pack.open(draft.write(tmp_path))

    return make


def _keys(resolver: NameResolver, prefix: str) -> list[str] | None:
    resolution = resolver.resolve(prefix)
    return None if resolution is None else [part.key for part in resolution.parts]


@pytest.mark.parametrize("packed", [LLAMA, PHI3, {}], ids=["split in vLLM's map", "fused in vLLM's map", "no map"])
def test_golden_pack_is_claimed_whole(golden_pack: Path, packed: dict[str, list[str]]) -> None:
    pack = Pack.open(golden_pack)
    resolver = NameResolver(pack, packed_modules=packed)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        assert _keys(resolver, f"{prefix}.self_attn.qkv_proj") == [f"{prefix}.self_attn.{n}_proj" for n in "qkv"]
        assert _keys(resolver, f"{prefix}.self_attn.o_proj") == [f"{prefix}.self_attn.o_proj"]
        if pack.experts:
            (mlp,) = (key for key in pack.experts if key.startswith(f"{prefix}."))
            assert _keys(resolver, f"{mlp}.gate") == [f"{mlp}.gate"]
            assert resolver.resolve_experts(f"{mlp}.experts") is pack.experts[mlp]
            continue
        assert _keys(resolver, f"{prefix}.mlp.gate_up_proj") == [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        assert _keys(resolver, f"{prefix}.mlp.down_proj") == [f"{prefix}.mlp.down_proj"]
    assert resolver.unclaimed() == ["lm_head"]
    assert _keys(resolver, "lm_head") == ["lm_head"]
    assert _keys(resolver, "") == ["model.embed_tokens"]
    resolver.raise_if_unmatched()


WRAPPED = [
    # stored key, vLLM prefix
    ("model.layers.0.mlp.down_proj", "language_model.model.layers.0.mlp.down_proj"),
    ("model.language_model.layers.0.mlp.down_proj", "language_model.model.layers.0.mlp.down_proj"),
    ("model.language_model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
    ("language_model.model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
    ("model.visual.blocks.0.mlp.linear_fc1", "visual.blocks.0.mlp.linear_fc1"),
    ("model.vision_tower.encoder.layers.0.fc1", "vision_tower.encoder.layers.0.fc1"),
    ("lm_head", "language_model.lm_head"),
    ("model.lm_head", "lm_head"),
    ("language_model.lm_head", "lm_head"),
    ("model.output", "lm_head"),
]


@pytest.mark.parametrize(("key", "prefix"), WRAPPED)
def test_wrapper_components_do_not_matter(pack_of: MakePack, key: str, prefix: str) -> None:
    assert _keys(NameResolver(pack_of(key)), prefix) == [key]


NOT_EQUAL = [
    ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    ("model.layers.0.mlp.down_proj", "visual.layers.0.mlp.down_proj"),
    ("model.visual.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
    ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"),
    ("model.layers.10.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    ("audio.model.layers.0.fc1", "model.layers.0.fc1"),
]


@pytest.mark.parametrize(("key", "prefix"), NOT_EQUAL)
def test_tolerance_never_reaches_another_module(pack_of: MakePack, key: str, prefix: str) -> None:
    assert NameResolver(pack_of(key)).resolve(prefix) is None


def test_ambiguous_name_lists_its_candidates(pack_of: MakePack) -> None:
    pack = pack_of("model.layers.0.mlp.down_proj", "language_model.layers.0.mlp.down_proj")
    with pytest.raises(Exl3PackError, match="2 candidates") as caught:
        NameResolver(pack).resolve("text_model.layers.0.mlp.down_proj")
    assert "model.layers.0.mlp.down_proj" in caught.value.found
    assert "language_model.layers.0.mlp.down_proj" in caught.value.found
    exact = NameResolver(pack).resolve("model.layers.0.mlp.down_proj")
    assert exact is not None and exact.parts[0].key == "model.layers.0.mlp.down_proj"


def _vl_rename(name: str) -> str | None:
    """The kind of mapper that vision-language classes have."""
    if name.startswith("audio_tower."):
        return None
    for old, new in (("model.visual.", "visual."), ("lm_head.", "language_model.lm_head.")):
        if name.startswith(old):
            return new + name[len(old) :]
    return name.replace("model.language_model.", "language_model.model.", 1)


def test_rename_mapper_is_applied_to_full_tensor_names(pack_of: MakePack) -> None:
    pack = pack_of(
        "model.language_model.layers.0.self_attn.q_proj",
        "model.language_model.layers.0.self_attn.k_proj",
        "model.language_model.layers.0.self_attn.v_proj",
        "model.visual.blocks.0.attn.proj",
        "audio_tower.layers.0.fc1",
        "lm_head",
        dense=("model.visual.blocks.0.attn.qkv",),
    )
    seen = []
    resolver = NameResolver(pack, lambda name: seen.append(name) or _vl_rename(name), LLAMA)
    assert all(name.endswith((".trellis", ".weight")) for name in seen)
    assert _keys(resolver, "language_model.model.layers.0.self_attn.qkv_proj") == [
        f"model.language_model.layers.0.self_attn.{name}_proj" for name in "qkv"
    ]
    assert _keys(resolver, "visual.blocks.0.attn.qkv") == ["model.visual.blocks.0.attn.qkv"]
    assert _keys(resolver, "visual.blocks.0.attn.proj") == ["model.visual.blocks.0.attn.proj"]
    assert _keys(resolver, "language_model.lm_head") == ["lm_head"]
    assert resolver.unclaimed() == [], "what the model's own mapper drops is not missed"


def test_shards_of_one_layer_may_be_exl3_and_dense(pack_of: MakePack) -> None:
    prefix = "model.layers.0.self_attn"
    pack = pack_of(f"{prefix}.q_proj", f"{prefix}.v_proj", dense=(f"{prefix}.k_proj",))
    resolution = NameResolver(pack, packed_modules=LLAMA).resolve(f"{prefix}.qkv_proj")
    assert resolution is not None
    assert [part.linear is not None for part in resolution.parts] == [True, False, True]
    assert [part.dense is not None for part in resolution.parts] == [False, True, False]
    assert [linear.key for linear in resolution.linears] == [f"{prefix}.q_proj", f"{prefix}.v_proj"]


def test_fused_in_the_checkpoint_is_one_part(pack_of: MakePack) -> None:
    for packed in (LLAMA, PHI3):
        pack = pack_of("model.layers.0.self_attn.qkv_proj", dense=("model.layers.0.mlp.gate_up_proj",))
        resolver = NameResolver(pack, packed_modules=packed)
        assert _keys(resolver, "model.layers.0.self_attn.qkv_proj") == ["model.layers.0.self_attn.qkv_proj"]
        assert _keys(resolver, "model.layers.0.mlp.gate_up_proj") == ["model.layers.0.mlp.gate_up_proj"]


def test_half_of_a_fused_module_is_an_error(pack_of: MakePack) -> None:
    pack = pack_of("model.layers.0.mlp.gate_proj")
    with pytest.raises(Exl3PackError, match="up_proj") as caught:
        NameResolver(pack, packed_modules=LLAMA).resolve("model.layers.0.mlp.gate_up_proj")
    assert "gate_proj" in caught.value.found and "up_proj" in caught.value.expected


def test_keys_serve_as_values_where_the_config_says_so(pack_of: MakePack) -> None:
    keys = [f"model.layers.0.self_attn.{name}_proj" for name in "qk"]
    pack = pack_of(*keys, config={"text_config": {"attention_k_eq_v": True}})
    assert _keys(NameResolver(pack, packed_modules=LLAMA), "model.layers.0.self_attn.qkv_proj") == [*keys, keys[1]]


def test_linear_attention_projections(pack_of: MakePack) -> None:
    prefix = "model.layers.0.linear_attn"
    pack = pack_of(f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z", dense=(f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"))
    for packed in (QWEN_NEXT, {"in_proj_qkvz": ["in_proj_qkvz"]}):
        resolver = NameResolver(pack, packed_modules=packed)
        assert _keys(resolver, f"{prefix}.in_proj_qkvz") == [f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"]
        assert _keys(resolver, f"{prefix}.in_proj_ba") == [f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"]


@pytest.mark.parametrize(
    ("fused", "names", "prefix", "keys"),
    [
        ("encoder_attn.kv_proj", ["encoder_attn.k_proj", "encoder_attn.v_proj"], "model.layers.0.encoder_attn.kv_proj",
         ["model.layers.0.encoder_attn.k_proj", "model.layers.0.encoder_attn.v_proj"]),
        ("gate_up_proj", ["w1", "w3"], "model.layers.0.mlp.gate_up_proj",
         ["model.layers.0.mlp.w1", "model.layers.0.mlp.w3"]),
        ("qkv_proj", ["q", "k", "v"], "qkv_proj", ["q", "k", "v"]),
    ],
)  # fmt: skip
def test_packed_names_join_without_stray_dots(
    pack_of: MakePack, fused: str, names: list[str], prefix: str, keys: list[str]
) -> None:
    assert _keys(NameResolver(pack_of(*keys), packed_modules={fused: names}), prefix) == keys


KDA = ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"]
"""Kimi's, as vLLM's class maps them, whether the gate is of full rank or not."""


@pytest.mark.parametrize(
    ("fused", "mapped", "stored"),
    [
        ("in_proj_qkvgfab", KDA, KDA),
        ("in_proj_qkvgfab", KDA, ["q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"]),
        ("in_proj_qkvbfg_a", [], [*KDA, "g_a_proj"]),
        ("wk_weights_proj", [], ["wk", "weights_proj"]),
        ("fused_wkv_wgate", ["wkv", "wgate"], ["wkv", "wgate"]),
        ("fused_wkv_wgate", ["wkv", "wgate"], ["wkv"]),
        ("down_proj", [], ["w2"]),
        ("down_inject", ["down", "inject", "_padding"], ["down", "inject"]),
    ],
    ids=[
        *("Kimi Linear", "Kimi K3", "GLM-5.3", "an indexer", "a compressor", "one of single tokens"),
        *("DeepSeek V4.1's shared experts", "rows that only align"),
    ],
)
def test_fused_attention_of_single_families(
    pack_of: MakePack, fused: str, mapped: list[str], stored: list[str]
) -> None:
    keys = [f"model.layers.0.self_attn.{name}" for name in stored]
    resolver = NameResolver(pack_of(*keys), packed_modules={fused: mapped} if mapped else {})
    assert _keys(resolver, f"model.layers.0.self_attn.{fused}") == keys


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        ("mtp.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj"),
        ("model.layers.2.mlp.down_proj", "mtp.layers.0.mlp.down_proj"),
        ("mtp.layers.0.mlp.down_proj", "mtp.layers.0.mlp.down_proj"),
    ],
)
def test_mtp_layers_are_found_under_either_number(pack_of: MakePack, key: str, prefix: str) -> None:
    pack = pack_of(key, "model.layers.0.mlp.down_proj", config={"num_nextn_predict_layers": 1})
    target = NameResolver(pack)
    target.resolve("model.layers.0.mlp.down_proj")
    target.raise_if_unmatched()  # MTP layers are not missed while nobody speculates
    draft = NameResolver(pack, draft=True)
    assert _keys(draft, prefix) == [key]


def test_draft_model_must_claim_the_mtp_layers_only(pack_of: MakePack) -> None:
    pack = pack_of("mtp.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj", "lm_head")
    draft = NameResolver(pack, draft=True)
    assert draft.unclaimed() == ["mtp.layers.0.mlp.down_proj"]
    draft.resolve("mtp.layers.0.mlp.down_proj")
    draft.raise_if_unmatched()


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("prefix", ["model.layers.0.mlp.experts", "language_model.model.layers.0.mlp.experts"])
def test_experts_of_both_naming_schemes(pack_of: MakePack, names: tuple[str, ...], prefix: str) -> None:
    keys = [f"model.layers.0.mlp.experts.{index}.{name}" for index in range(3) for name in names]
    pack = pack_of(*keys)
    resolver = NameResolver(pack)
    assert resolver.resolve(prefix) is None
    group = resolver.resolve_experts(prefix)
    assert group is not None
    assert group.experts == (0, 1, 2)
    assert group.roles == ("gate", "up", "down")
    assert group.members[1]["down"] == f"model.layers.0.mlp.experts.1.{names[2]}"
    assert resolver.unclaimed() == []


def test_experts_behind_a_component_that_the_model_class_adds(pack_of: MakePack) -> None:
    pack = pack_of("model.layers.0.experts.0.up_proj", "model.layers.0.experts.0.down_proj")
    group = NameResolver(pack).resolve_experts("model.layers.0.moe.experts")
    assert group is not None and group.roles == ("up", "down")


@pytest.mark.parametrize(("role", "axis"), [("gate_proj", "out"), ("up_proj", "out"), ("down_proj", "in")])
def test_sliced_mlp_is_one_part(pack_of: MakePack, role: str, axis: str) -> None:
    slices = [f"model.layers.0.mlp.{role}.slice.{index}" for index in (2, 0, 1)]
    resolution = NameResolver(pack_of(*slices)).resolve(f"model.layers.0.mlp.{role}")
    assert resolution is not None
    (part,) = resolution.parts
    assert (part.key, part.linear, part.dense) == (f"model.layers.0.mlp.{role}", None, None)
    assert [linear.key for linear in part.slices] == sorted(slices)
    assert part.slice_axis == axis


def test_sliced_gate_and_up_fuse_and_count_as_claimed(pack_of: MakePack) -> None:
    keys = [f"model.layers.0.mlp.{role}.slice.{index}" for role in ("gate_proj", "up_proj") for index in range(2)]
    resolver = NameResolver(pack_of(*keys), packed_modules=LLAMA)
    resolution = resolver.resolve("model.layers.0.mlp.gate_up_proj")
    assert resolution is not None and [len(part.slices) for part in resolution.parts] == [2, 2]
    assert resolver.unclaimed() == []


def test_nothing_matched_lists_both_sides(pack_of: MakePack) -> None:
    resolver = NameResolver(pack_of("model.layers.0.mlp.down_proj"))
    assert resolver.resolve("backbone.h.0.ffn.out") is None
    with pytest.raises(Exl3PackError) as caught:
        resolver.raise_if_unmatched()
    assert "model.layers.0.mlp.down_proj" in str(caught.value)
    assert "backbone.h.0.ffn.out" in str(caught.value)
    assert "0 matched" in caught.value.found


def test_leftovers_are_an_error_unless_skipped_on_purpose(pack_of: MakePack) -> None:
    resolver = NameResolver(pack_of("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"))
    resolver.resolve("model.layers.0.mlp.down_proj")
    with pytest.raises(Exl3PackError, match=re.escape("model.layers.1.mlp.down_proj")):
        resolver.raise_if_unmatched()
    resolver.raise_if_unmatched(lambda key: "another pipeline stage" if ".layers.1." in key else None)


def test_experts_that_no_module_finds_are_told_with_those_that_lack_theirs(pack_of: MakePack) -> None:
    keys = [f"model.layers.0.mlp.experts.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    resolver = NameResolver(pack_of(*keys))
    assert resolver.resolve_experts("model.layers.1.block_sparse_moe.experts") is None
    with pytest.raises(Exl3PackError, match=r"without a match: model\.layers\.1\.block_sparse_moe\.experts"):
        resolver.raise_if_unmatched()


def test_experts_under_another_prefix_are_the_only_ones_of_their_layer(pack_of: MakePack) -> None:
    keys = [
        f"{mlp}.experts.0.{name}"
        for mlp in ("model.layers.0.block_sparse_moe", "model.layers.1.mlp", "model.layers.1.other")
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    resolver = NameResolver(pack_of(*keys))
    group = resolver.resolve_experts("model.layers.0.mlp.experts")
    assert group is not None and group.key == "model.layers.0.block_sparse_moe"
    assert resolver.resolve_experts("model.layers.1.neither.experts") is None


def test_modules_that_have_their_tensors_are_not_said_to_lack_them(pack_of: MakePack) -> None:
    resolver = NameResolver(pack_of("model.layers.0.mlp.down_proj", "model.layers.7.mlp.down_proj"))
    resolver.resolve("model.layers.0.mlp.down_proj")
    with pytest.raises(Exl3PackError, match=r"layers\.7\.mlp.*all modules of the model have their tensors.*left over"):
        resolver.raise_if_unmatched()


def test_row_coded_embedding_is_found_without_a_prefix() -> None:
    folder = Path(__file__).parents[1] / "data/packs/qwen3-2.25-mul1-emb4"
    resolver = NameResolver(Pack.open(folder))
    for prefix in ("", "model.embed_tokens", "language_model.model.embed_tokens"):
        table = resolver.resolve_embedding(prefix)
        assert table is not None and table.key == "model.embed_tokens"


def test_dense_embedding_is_no_row_table(tmp_path: Path) -> None:
    resolver = NameResolver(Pack.open(llama().write(tmp_path)))
    assert resolver.resolve_embedding("model.embed_tokens") is None


def test_embedding_of_the_text_model_is_taken_not_a_tower_s(pack_of: MakePack) -> None:
    pack = pack_of("lm_head", dense=("model.embed_tokens", "model.vision_tower.embeddings.embed_tokens"))
    assert _keys(NameResolver(pack), "") == ["model.embed_tokens"]


def test_duplicated_vision_attention_prefers_the_fused_form(pack_of: MakePack) -> None:
    attention = "model.visual.blocks.0.attn"
    pack = pack_of(*(f"{attention}.{name}" for name in "qkv"), dense=(f"{attention}.qkv",))
    resolver = NameResolver(pack, packed_modules={"qkv": ["q", "k", "v"]})
    assert _keys(resolver, "visual.blocks.0.attn.qkv") == [f"{attention}.qkv"]
    resolver.raise_if_unmatched()


def test_a_linear_of_another_layer_does_not_hide_behind_its_neighbour(pack_of: MakePack) -> None:
    keys = [f"model.layers.{layer}.mlp.down_proj" for layer in (1, 10, 11)]
    resolver = NameResolver(pack_of(*keys, config={"num_hidden_layers": 12}))
    assert [_keys(resolver, key) for key in keys] == [[key] for key in keys]


def test_linear_helper_makes_what_the_resolver_needs() -> None:
    assert set(linear("a", 128, 128)) == {"a.trellis", "a.suh", "a.svh", "a.mul1"}


def test_a_layer_s_own_output_is_no_head(pack_of: MakePack) -> None:
    resolver = NameResolver(pack_of("lm_head", "model.layers.0.attention.dense"))
    assert resolver.resolve("model.layers.0.attention.output") is None
    assert _keys(resolver, "model.output") == ["lm_head"]


def test_an_inner_class_renames_below_its_wrapper() -> None:
    def inner(name: str) -> str | None:
        return f"self_decoder.{name}" if name.startswith("altup.") else name

    def outer(name: str) -> str | None:
        return name.replace("model.language_model.", "language_model.model.") if name.startswith("model.") else name

    assert renamed("model.altup.0.weight", inner) == "model.self_decoder.altup.0.weight"
    assert renamed("model.layers.0.altup.weight", inner) == "model.layers.0.altup.weight"
    assert renamed("model.language_model.layers.0.x.weight", outer) == "language_model.model.layers.0.x.weight"
    assert renamed("language_model.model.layers.0.x.weight", outer) == "language_model.model.layers.0.x.weight"
    assert renamed("dropped.weight", lambda name: None) == "dropped.weight"
