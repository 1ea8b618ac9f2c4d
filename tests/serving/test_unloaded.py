"""Tensors that a pack lacks although its model needs them: refused before serving, never served as noise."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from tests.serving.conftest import Tensors
from tests.serving.engine import engine, generate
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.stored import Codebook, StoredLinear, StoredTensor
from vllm_exl3.serving.loading import LoadedParts
from vllm_exl3.serving.unloaded import watched, watched_experts

ODD = "llama_odd-4.0-mul1"
QWEN = "qwen3_moe-3.0-mul1"


def without(prefix: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        ("model.layers.1.self_attn.o_proj.", r"model\.layers\.1\.self_attn\.o_proj\.weight"),
        ("model.embed_tokens.", r"embed_tokens\.weight"),
    ],
    ids=["linear", "embedding"],
)
def test_a_layer_of_which_nothing_is_stored_is_refused(variant: Callable[..., Path], prefix: str, named: str) -> None:
    with pytest.raises(Exl3PackError, match=named), engine(variant(ODD, without(prefix))):
        pass


def with_16_bit_experts(tensors: Tensors, absent: str) -> None:
    """Layer 1 with experts in 16 bits, but for one tensor."""
    prefix, (hidden, inner) = "model.layers.1.mlp.experts.", (256, 128)
    without(prefix)(tensors)
    for expert in range(8):
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            tensors[f"{prefix}{expert}.{name}_proj.weight"] = torch.full(shape, 0.01, dtype=torch.float16)
    tensors.pop(f"{prefix}{absent}.weight", None)


def test_a_16_bit_expert_that_is_not_stored_is_refused(variant: Callable[..., Path]) -> None:
    folder = variant(QWEN, lambda tensors: with_16_bit_experts(tensors, "5.up_proj"))
    with pytest.raises(Exl3PackError, match=r"layers\.1\.mlp\.experts.*found 1 of 8 experts"), engine(folder):
        pass


def test_16_bit_experts_beside_exl3_ones_are_served(variant: Callable[..., Path]) -> None:
    with engine(variant(QWEN, lambda tensors: with_16_bit_experts(tensors, "none"))) as llm:
        assert len(generate(llm, [[1, 2, 3]], 4)[0]) == 4


class FakeExperts(FusedMoEMethodBase):
    """Keeps weights as vLLM's method for 16 bits does, with room for padding."""

    def __init__(self, gated: bool) -> None:
        self.moe = SimpleNamespace(is_act_and_mul=gated)

    def create_weights(self, layer: torch.nn.Module, *_: object) -> None:  # type: ignore[override]
        rows = 8 if self.moe.is_act_and_mul else 4
        layer.w13_weight = torch.nn.Parameter(torch.zeros(3, rows, 6, dtype=torch.bfloat16))
        layer.w2_weight = torch.nn.Parameter(torch.zeros(3, 6, 4, dtype=torch.bfloat16))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.w13_weight = torch.nn.Parameter(torch.full((2,), torch.nan))  # another layout, which is not looked at

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None: ...

    def apply(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize("gated", [True, False])
def test_experts_of_which_a_projection_was_never_written_are_counted(gated: bool) -> None:
    """Padding stays unwritten, without a complaint."""
    for absent in ("none", "gate", "up", "down"):
        method, layer = watched_experts(FakeExperts(gated), "some.experts"), torch.nn.Module()
        method.create_weights(layer)
        for expert in range(3):
            for name, target in (
                ("gate", layer.w13_weight.data[expert, :3, :5]),
                ("up", layer.w13_weight.data[expert, 4:7, :5] if gated else torch.zeros(1)),
                ("down", layer.w2_weight.data[expert, :5, :3]),
            ):
                if name != absent or expert == 1:
                    target.fill_(1)
        if absent == "none" or (absent == "up" and not gated):
            method.process_weights_after_loading(layer)
            method.process_weights_after_loading(layer)  # as reloading does
        else:
            with pytest.raises(Exl3PackError, match=r"some\.experts: found 2 of 3 experts"):
                method.process_weights_after_loading(layer)


def test_a_bias_that_the_model_has_and_the_pack_has_not_is_refused(variant: Callable[..., Path]) -> None:
    folder = variant(ODD, config=lambda config: config.update(attention_bias=True))
    with pytest.raises(Exl3PackError, match=r"q_proj\.bias"), engine(folder):
        pass


def test_dummy_weights_count_as_loaded(variant: Callable[..., Path]) -> None:
    """No loader is called, and every parameter is written."""
    folder = variant(ODD, config=lambda config: config.update(attention_bias=True))
    with engine(folder, load_format="dummy") as llm:
        assert len(generate(llm, [[1, 2, 3]], 4)[0]) == 4


@pytest.mark.parametrize(
    ("loaded", "refused"),
    [((), 4), ((slice(0, 2),), 2), ((slice(0, 2), slice(2, 4)), 0)],
    ids=["nothing", "half of a fused layer", "all"],
)
def test_rows_that_were_never_written_are_counted(
    monkeypatch: pytest.MonkeyPatch, loaded: tuple[slice, ...], refused: int
) -> None:
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1)
    method, layer = watched(UnquantizedLinearMethod(), "some.layer"), torch.nn.Module()
    method.create_weights(layer, 8, [2, 2], 8, 4, torch.bfloat16, weight_loader=lambda *_: None)
    for rows in loaded:
        layer.weight.data[rows] = 1
    assert type(method) is UnquantizedLinearMethod
    if refused:
        with pytest.raises(Exl3PackError, match=f"some.layer.weight: found {refused} of 4 rows"):
            method.process_weights_after_loading(layer)
    else:
        method.process_weights_after_loading(layer)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """What vLLM's linears ask for when they are built."""
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path / 'group'}", 0, "gloo")
        initialize_model_parallel()
        yield
        cleanup_dist_env_and_memory()


class Sixteen(QuantizationConfig):
    """Gives every layer the watched method."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> UnquantizedLinearMethod:
        return watched(UnquantizedLinearMethod(), prefix)

    get_name = get_supported_act_dtypes = get_min_capability = get_config_filenames = from_config = None  # type: ignore[assignment]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [QKVParallelLinear, RowParallelLinear, ReplicatedLinear])
def test_a_bias_that_was_never_written_is_refused(kind: type[LinearBase]) -> None:
    sizes = (8, 4, 2, 1) if kind is QKVParallelLinear else (8, 16)
    for bias, written, refused in ((True, 16, 0), (True, 12, 4), (True, 0, 16), (False, 0, 0)):
        layer = kind(*sizes, bias=bias, quant_config=Sixteen(), prefix="some.layer")
        assert "register_parameter" not in vars(layer)
        layer.weight.data.fill_(1)
        if bias:
            assert layer.bias.isnan().all()
            layer.bias.data[:written] = 1
        with (
            pytest.raises(Exl3PackError, match=rf"some\.layer\.bias: found {refused} of 16 rows")
            if refused
            else contextlib.nullcontext()
        ):
            layer.quant_method.process_weights_after_loading(layer)


def exl3_part(codebook: Codebook) -> Part:
    def stored(leaf: str, dtype: str, *shape: int) -> StoredTensor:
        return StoredTensor(f"key.{leaf}", dtype, shape, "model.safetensors", 0, 2)

    marker = None if codebook is Codebook.INST3 else stored(codebook.label, "I32")
    scales = stored("suh", "F16", 128), stored("svh", "F16", 128)
    linear = StoredLinear("key", 8, codebook, 128, 128, stored("trellis", "I16", 8, 8, 64), *scales, None, marker)
    return Part("key", linear, None)


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bias", [False, True])
def test_each_tensor_of_a_layer_is_missed(codebook: Codebook, bias: bool) -> None:
    leaves = ["trellis", "suh", "svh", *([] if codebook is Codebook.INST3 else [codebook.label]), *["bias"] * bias]
    for absent in [None, *leaves]:
        parts = LoadedParts("layer")
        for leaf in leaves:
            if leaf != absent:
                parts.add(leaf, 0)
        if absent is None:
            parts.check((exl3_part(codebook),), bias=bias)
        else:
            with pytest.raises(Exl3PackError, match=rf"key\.{absent}"):
                parts.check((exl3_part(codebook),), bias=bias)
