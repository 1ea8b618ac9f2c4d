"""Layers that a pack keeps in its source model's format: who serves them, and what is refused."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.utils import set_weight_attrs

from tests.serving.conftest import Tensors, golden_logits, relative_error
from tests.serving.engine import engine, logits_of, model_of
from tests.tiny_pack import llama
from vllm_exl3.pack.codec import dense_weight
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part, Resolution
from vllm_exl3.pack.stored import Codebook, StoredTensor
from vllm_exl3.serving import delegate, methods
from vllm_exl3.serving.config import Exl3Config
from vllm_exl3.serving.delegate import SourceFormat
from vllm_exl3.serving.listed import is_listed
from vllm_exl3.serving.plain_layers import wants_a_matrix

PACK = "qwen3_moe-3.0-mul1"
SOURCE = {"quant_method": "rows_int8", "skip": ["gate"]}


class RowsMethod(LinearMethodBase):
    """int8 weights with a scale per row: a source format that runs on any CPU."""

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], **extra: Any
    ) -> None:
        inputs, outputs = input_size_per_partition, sum(output_partition_sizes)
        weight = Parameter(torch.zeros(outputs, inputs, dtype=torch.int8), requires_grad=False)
        scale = Parameter(torch.zeros(outputs), requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, "weight_loader": extra["weight_loader"]})
        set_weight_attrs(scale, {"output_dim": 0, "weight_loader": extra["weight_loader"]})
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scale)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight.float() * layer.weight_scale[:, None], bias)


@register_quantization_config("rows_int8")
class RowsConfig(QuantizationConfig):
    def __init__(self, skip: list[str]) -> None:
        super().__init__()
        self.skip = skip

    @classmethod
    def get_name(cls) -> str:
        return "rows_int8"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RowsConfig":
        return cls(config["skip"])

    def get_quant_method(self, layer: Any, prefix: str) -> LinearMethodBase:
        if prefix.rpartition(".")[2] in self.skip or not isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return RowsMethod()


def attention(tensors: Tensors, write: Callable[[str, torch.Tensor], None]) -> None:
    """Take the attention's EXL3 linears out, and hand over their decoded weights ``[out, in]``."""
    for key in [name[: -len(".trellis")] for name in tensors if ".self_attn." in name and name.endswith(".trellis")]:
        trellis, suh, svh = (tensors.pop(f"{key}.{leaf}").numpy() for leaf in ("trellis", "suh", "svh"))
        del tensors[f"{key}.mul1"]
        weight = dense_weight(trellis, trellis.shape[2] // 8, Codebook.MUL1, suh, svh)
        write(key, torch.from_numpy(weight.T.copy()).float())


def in_rows(tensors: Tensors) -> None:
    def write(key: str, weight: torch.Tensor) -> None:
        scale = weight.abs().amax(dim=1) / 127
        tensors[f"{key}.weight"] = (weight / scale[:, None]).round().to(torch.int8)
        tensors[f"{key}.weight_scale"] = scale

    attention(tensors, write)


def in_sixteen_bits(tensors: Tensors) -> None:
    def write(key: str, weight: torch.Tensor) -> None:
        tensors[f"{key}.weight"] = weight.half()

    attention(tensors, write)


def declare(**keys: Any) -> Callable[[dict], None]:
    return lambda config: config["quantization_config"].update(keys)


def test_layers_in_the_source_format_are_served_by_its_own_config(variant: Callable[..., Path]) -> None:
    ids, logits = golden_logits(PACK)
    with engine(variant(PACK, in_rows, declare(non_routed_quantization=SOURCE))) as llm:
        qkv = model_of(llm).get_submodule("model.layers.0.self_attn.qkv_proj")
        assert isinstance(qkv.quant_method, RowsMethod)
        error = relative_error(logits_of(llm, ids)[:40], logits[:40])
    assert 1e-3 < error < 5e-2  # int8 rounding is seen, and nothing worse


def without_a_scale(tensors: Tensors) -> None:
    in_rows(tensors)
    del tensors["model.layers.0.self_attn.k_proj.weight_scale"]


def test_scales_that_are_not_stored_are_an_error(variant: Callable[..., Path]) -> None:
    folder = variant(PACK, without_a_scale, declare(non_routed_quantization=SOURCE))
    message = r"no weight_scale for model\.layers\.0\.self_attn\.qkv_proj, which .* declares as rows_int8"
    with pytest.raises(Exl3PackError, match=message), engine(folder):
        pass


def test_headers_that_say_16_bits_win(variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The declaration lists the routers and not these layers; their tensors have no scales."""
    ids, logits = golden_logits(PACK)
    source = {**SOURCE, "modules_to_not_convert": ["mlp.gate"]}
    said: list[str] = []
    monkeypatch.setattr(delegate.logger, "warning", lambda text, *values: said.append(text % values))
    with engine(variant(PACK, in_sixteen_bits, declare(non_routed_quantization=source))) as llm:
        assert relative_error(logits_of(llm, ids)[:40], logits[:40]) <= 1e-3
    assert len(said) == 1 and "4 layers that non_routed_quantization declares as rows_int8" in said[0]


def test_codes_of_a_layer_that_is_listed_as_not_converted_are_refused(variant: Callable[..., Path]) -> None:
    """vLLM would take the codes for values."""
    skipping = {**SOURCE, "skip": ["gate", "qkv_proj"]}
    folder = variant(PACK, in_rows, declare(non_routed_quantization=skipping))
    with (
        pytest.raises(Exl3PackError, match=r"codes for model\.layers\.0\.self_attn\.qkv_proj .*q_proj"),
        engine(folder),
    ):
        pass


MAPPER = WeightsMapper(
    orig_to_new_prefix={"model.visual.": "visual.", "model.language_model.": "language_model.model."}
)
TOWER = ("visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv")
BLOCK = ("language_model.model.layers.3.mlp.gate", "model.language_model.layers.3.mlp.gate")


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"])
@pytest.mark.parametrize(
    ("pattern", "names", "listed"),
    [
        ("model.visual", TOWER, True),
        ("model.visual.", TOWER, True),
        ("visual", TOWER, True),
        ("visual.", TOWER, True),
        ("blocks.0", TOWER, True),
        ("model.visual.blocks.0.attn.qkv", TOWER, True),
        (r"re:.*visual\..*", TOWER, True),
        ("re:visual", TOWER, True),
        ("*visual*", TOWER, True),
        ("model.visual.*", TOWER, True),
        ("model.vis", TOWER, False),
        ("isual", TOWER, False),
        ("qk", TOWER, False),
        ("blocks.1", TOWER, False),
        ("re:blocks", TOWER, False),
        ("re:(", TOWER, False),
        ("", TOWER, False),
        (".", TOWER, False),
        ("lm_head", TOWER, False),
        ("gate", BLOCK, True),
        ("mlp.gate", BLOCK, True),
        ("language_model.layers.3", BLOCK, True),
        ("language_model.model.layers.3", BLOCK, True),
        ("layers.30", BLOCK, False),
        ("gate_proj", BLOCK, False),
    ],
)
def test_listed_modules_are_known_by_components_on_both_sides_of_the_mapper(
    key: str, pattern: str, names: tuple[str, str], listed: bool
) -> None:
    assert is_listed({key: ["other", pattern]}, names, [MAPPER]) == listed
    if listed and "language_model.model" not in pattern and not pattern.startswith(("re:visual",)):
        assert is_listed({key: [pattern]}, names[1:], [MAPPER])  # without vLLM's name
    assert not is_listed({key: None}, names, [MAPPER])


def test_what_headers_do_not_tell_the_list_does() -> None:
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    source = SourceFormat({"non_routed_quantization": {**SOURCE, "modules_to_not_convert": ["model.visual"]}}, "pack")
    for plain, method in ((None, UnquantizedLinearMethod), (True, UnquantizedLinearMethod), (False, RowsMethod)):
        assert type(source.linear(layer, *TOWER[:1], TOWER[1:], [MAPPER], {}, plain)) is method
    assert type(source.linear(layer, "model.layers.0.mlp.up_proj", [], [MAPPER], {}, None)) is RowsMethod


def test_a_policy_serves_sixteen_bits_as_stored(variant: Callable[..., Path]) -> None:
    ids, logits = golden_logits(PACK)
    keys = declare(non_routed_quantization=SOURCE, non_routed_dtype_policy="bf16_as_stored")
    with engine(variant(PACK, in_sixteen_bits, keys)) as llm:
        assert relative_error(logits_of(llm, ids)[:40], logits[:40]) <= 1e-3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"non_routed_dtype_policy": "as_is"}, "non_routed_dtype_policy 'as_is'; expected '' or 'bf16_as_stored'"),
        ({"non_routed_quantization": "fp8"}, "non_routed_quantization 'fp8'; expected the source model's"),
        ({"mtp_experts": "fp4"}, "mtp_experts 'fp4'; expected 'exl3' or 'source'"),
        *(
            ({"mtp_experts_start_layer": layer}, f"mtp_experts_start_layer {layer!r}; expected the number of a layer")
            for layer in ("40", -1, True, 2.0)
        ),
        ({"non_routed_quantization": {"quant_method": "EXL3"}}, "with quant_method exl3; expected the source model's"),
    ],
)
def test_keys_without_a_meaning_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Exl3PackError, match=message):
        SourceFormat(keys, "pack")


def test_a_format_that_only_the_sidecar_declares_is_not_forgotten(variant: Callable[..., Path]) -> None:
    """vLLM hands over config.json's block; without the sidecar's, scaled weights would be served as they stand."""
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    folder = variant(PACK, in_rows)
    (folder / "quantization_config.json").write_text(json.dumps({"non_routed_quantization": SOURCE}))
    config = Exl3Config.from_config(json.loads((folder / "config.json").read_text())["quantization_config"])
    config.maybe_update_config(str(folder))
    source = config.source_format()
    assert isinstance(source.linear(layer, "model.layers.0.self_attn.qkv_proj", [], [], {}), RowsMethod)


def test_a_format_that_vllm_does_not_know_is_refused() -> None:
    source = SourceFormat({"non_routed_quantization": {"quant_method": "int5"}}, "pack")
    with pytest.raises(Exl3PackError, match=r"'int5'.*expected a quantization_config that this vLLM serves"):
        source.linear(SimpleNamespace(), "model.layers.0.mlp.gate_up_proj", ["k"], [], {})  # type: ignore[arg-type]


DELEGATE = {"non_routed_quantization": SOURCE}
AS_STORED = {**DELEGATE, "non_routed_dtype_policy": "bf16_as_stored"}
SOURCE_DRAFT = {**AS_STORED, "mtp_experts": "source"}
LEAVES = ("weight", "weight_scale")
EXPERTS = [
    ({}, 3, False),
    (DELEGATE, 3, True),
    (AS_STORED, 3, False),
    (SOURCE_DRAFT, 3, True),
    ({**SOURCE_DRAFT, "mtp_experts_start_layer": 3}, 3, True),
    ({**SOURCE_DRAFT, "mtp_experts_start_layer": 4}, 3, False),
]


@pytest.mark.parametrize(("keys", "layer", "delegated"), EXPERTS)
def test_which_source_experts_are_delegated(keys: dict[str, Any], layer: int, delegated: bool) -> None:
    source = SourceFormat(keys, "pack")
    method = source.experts(SimpleNamespace(), f"model.layers.{layer}.mlp.experts", [], {})  # type: ignore[arg-type]
    assert (method is not None) == delegated


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ((), None),
        (("1.up_proj.weight_scale",), "model.layers.3.mlp.experts.1.up_proj.weight_scale is not stored"),
        (("0.down_proj.weight_scale", "1.down_proj.weight_scale"), "experts.0.down_proj.weight_scale is not stored"),
        (("every tensor",), r"model.layers.3.mlp.experts.\*.weight_scale is not stored"),
    ],
    ids=["none", "one", "of a projection", "all"],
)
def test_every_expert_in_the_source_format_has_its_scales(
    missing: tuple[str, ...], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 3 is delegated; another has all of its scales, a third is EXL3."""
    layer = SimpleNamespace(named_parameters=lambda recurse: [("w13_weight_scale", None), ("w2_weight_scale", None)])
    names = [f"{e}.{p}.{leaf}" for e in (0, 1) for p in ("gate_proj", "up_proj", "down_proj") for leaf in LEAVES]
    kept = [] if missing == ("every tensor",) else [name for name in names if name not in missing]
    kept.append("e_score_correction_bias")  # of the router, whatever the model calls it
    stored = {3: kept, 4: names, 5: ["0.gate_proj.trellis", "0.gate_proj.suh"]}
    pack: Any = SimpleNamespace(
        tensors=[f"model.layers.{number}.mlp.experts.{name}" for number, held in stored.items() for name in held],
        linears={"model.layers.5.mlp.experts.0.gate_proj": None},
        config={},
    )
    monkeypatch.setattr(delegate, "RoutedExperts", SimpleNamespace)
    source = SourceFormat(DELEGATE, "pack")
    source.experts(layer, "model.layers.3.mlp.experts", [], {})  # type: ignore[arg-type]
    if named is None:
        source.check(pack, lambda name: name)
    else:
        with pytest.raises(Exl3PackError, match=named):
            source.check(pack, lambda name: name)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


@pytest.mark.parametrize(
    ("keys", "shared", "expected"),
    [
        ({"non_routed_quantization": BLOCKS}, False, [32, 32]),
        ({"non_routed_quantization": BLOCKS}, True, None),
        ({"non_routed_quantization": BLOCKS, "non_routed_dtype_policy": "bf16_as_stored"}, False, None),
        ({"non_routed_quantization": SOURCE}, False, None),
        ({}, False, None),
    ],
    ids=["in blocks", "EXL3 shared experts", "as stored", "a format without", "no format"],
)
def test_blocks_of_the_source_format_are_those_that_deepseeks_classes_read(
    keys: dict[str, Any], shared: bool, expected: list[int] | None, tmp_path: Path
) -> None:
    """V4.1's class names scales by them: those of layers in blocks of 32 end in weight_scale."""
    draft = llama()
    assert draft.config is not None
    draft.config["quantization_config"].update(keys)
    draft.sidecar = None
    if shared:
        draft.add_linear("model.layers.0.mlp.shared_experts.up_proj", 128, 128)
    folder = draft.write(tmp_path / "pack")
    config = Exl3Config.from_config(draft.config["quantization_config"])
    assert shared or config.weight_block_size == expected  # vLLM reads it before the pack is named, too
    config.source = str(folder)
    assert config.weight_block_size == expected
    model = importlib.import_module("vllm.models.deepseek_v41.nvidia.model")
    name = model._linear_scale_param_name(SimpleNamespace(quant_config=config), "fp4")
    assert name == ("weight_scale" if expected else "weight_scale_inv")


@pytest.mark.parametrize(("family", "experts"), [("deepseek_v4", Mxfp4MoEMethod), ("llama", Fp8MoEMethod)])
def test_fp8_of_a_deepseek_v4_has_experts_in_fp4(family: str, experts: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts keep them when ``mtp_experts`` is ``source``; any other model's fp8 experts are fp8."""
    built: list[type] = []
    for method in (Mxfp4MoEMethod, Fp8MoEMethod):
        monkeypatch.setattr(method, "__init__", lambda self, *_, **__: built.append(type(self)))
    current = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=family)))
    for path in (delegate, importlib.import_module("vllm.models.deepseek_v4.quant_config")):
        monkeypatch.setattr(path, "get_current_vllm_config_or_none", lambda: current, raising=False)
        monkeypatch.setattr(path, "get_current_vllm_config", lambda: current, raising=False)
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace()  # type: ignore[assignment]
    source = SourceFormat({"non_routed_quantization": BLOCKS, "mtp_experts": "source"}, "pack")
    assert isinstance(source.experts(layer, "model.layers.9.ffn.experts", [], {}), experts)
    assert built == [experts]


@pytest.mark.parametrize("name", ["wo_a", "weights_proj"])
def test_a_matrix_in_the_source_format_is_served_in_it_where_vllm_reads_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are decoded because vLLM reads them are so where they are EXL3; fp8 codes have scales beside them."""
    prefix = f"model.layers.0.attn.{name}"
    stored = StoredTensor(f"{prefix}.weight", "F8_E4M3", (256, 1024), "model.safetensors", 0, 1)
    resolution = Resolution(prefix, (Part(prefix, None, stored),))
    delegated = RowsMethod()
    config: Any = SimpleNamespace(
        names=lambda: SimpleNamespace(resolve=lambda _: resolution),
        pack=SimpleNamespace(config={"architectures": ["DeepseekV4ForCausalLM"]}),
        source_format=lambda: SimpleNamespace(linear=lambda *_: delegated),
        claimed=set(), mappers=[], packed_modules_mapping={}, report=SimpleNamespace(add_dense=lambda *_: None),
    )  # fmt: skip
    monkeypatch.setattr(methods, "says_plain", lambda *_: False)
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(layer)
    assert wants_a_matrix(config.pack.config, prefix)
    assert methods.linear_method(config, layer, prefix) is delegated
