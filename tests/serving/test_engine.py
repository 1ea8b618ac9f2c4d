"""Whole engines on the CPU: compilation, reloading, mixed layers, biases, tensor parallelism."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.serving.conftest import PACKS, Tensors, golden_logits, relative_error
from tests.serving.engine import (
    PROMPTS,
    assert_reload_restores,
    engine,
    generate,
    logits_of,
    model_of,
)
from vllm_exl3 import runtime_diagnostics
from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.pack.codec import dense_weight
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.stored import Codebook

ODD = "llama_odd-4.0-mul1"
PHI = "phi3-5.0-mul1"


def test_compiled_and_eager_engines_agree() -> None:
    with engine(PACKS / PHI) as llm:
        eager = generate(llm, PROMPTS)
    backends.reset_calls()
    with engine(PACKS / PHI, enforce_eager=False) as llm:
        assert generate(llm, PROMPTS) == eager
    assert any(layer_class == "QKVParallelLinear" for _, _, layer_class in backends.calls())


def test_reloading_the_weights_gives_the_same_logits() -> None:
    ids, _ = golden_logits(PHI)
    with engine(PACKS / PHI) as llm:
        assert_reload_restores(llm, ids, model_of(llm))


def test_parameters_are_flat_and_as_large_as_the_pack() -> None:
    with engine(PACKS / ODD) as llm:
        layers = dict(model_of(llm).named_modules())
        qkv = layers["model.layers.0.self_attn.qkv_proj"]
        assert {name: (param.dtype, param.dim()) for name, param in qkv.named_parameters()} == {
            "trellis": (torch.int16, 1),
            "suh": (torch.float16, 1),
            "svh": (torch.float16, 1),
            "mul1": (torch.int32, 1),
        }
        assert qkv.weight_packed is qkv.trellis
        words = sum(param.numel() for name, param in model_of(llm).named_parameters() if name.endswith(".trellis"))
    from vllm_exl3.pack import Pack

    stored = Pack.open(PACKS / ODD)
    assert words * 2 == sum(linear.trellis.nbytes for linear in stored.linears.values())


def up_in_sixteen_bits(tensors: Tensors) -> None:
    """Store one half of a fused layer as its decoded weight, as packs with unquantized layers do."""
    key = "model.layers.0.mlp.up_proj"
    parts = {leaf: tensors.pop(f"{key}.{leaf}") for leaf in ("trellis", "suh", "svh", "mul1")}
    half_bits = parts["trellis"].shape[2] // 8
    weight = dense_weight(
        parts["trellis"].numpy(), half_bits, Codebook.MUL1, parts["suh"].numpy(), parts["svh"].numpy()
    )
    tensors[f"{key}.weight"] = torch.from_numpy(weight.T[:384]).float().contiguous()


def test_a_fused_layer_may_be_half_exl3_half_dense(variant: Callable[..., Path]) -> None:
    ids, logits = golden_logits(PHI)
    with engine(variant(PHI, up_in_sixteen_bits)) as llm:
        assert relative_error(logits_of(llm, ids), logits) <= 1e-3
        assert "weight" in dict(model_of(llm).get_submodule("model.layers.0.mlp.gate_up_proj").named_parameters())


def with_biases(tensors: Tensors) -> None:
    """Biases as exllamav3 stores them: as wide as the padded layer."""
    for name, width in (("q", 256), ("k", 128), ("v", 128), ("o", 256)):
        bias = torch.zeros(width, dtype=torch.float16)
        bias[: 64 if name in "kv" else 256] = torch.arange(64 if name in "kv" else 256) / 256
        for layer in (0, 1):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias.clone()


def test_padded_biases_are_cut_to_the_layer(variant: Callable[..., Path]) -> None:
    folder = variant(ODD, with_biases, lambda config: config.update(attention_bias=True))
    ids, logits = golden_logits(ODD)
    with engine(folder) as llm:
        bias = model_of(llm).get_submodule("model.layers.0.self_attn.qkv_proj").bias
        wide, narrow = torch.arange(256) / 256, torch.arange(64) / 256
        torch.testing.assert_close(bias.data, torch.cat([wide, narrow, narrow]))
        before = logits_of(llm, ids)
        assert relative_error(before, logits) > 1e-2
        bias.data.zero_()
        llm.collective_rpc("reload_weights")
        torch.testing.assert_close(logits_of(llm, ids), before, rtol=0, atol=0)


def poison(leaf: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"model.layers.1.mlp.down_proj.{leaf}"][...] = value

    return change


@pytest.mark.parametrize(("leaf", "value"), [("suh", float("nan")), ("svh", float("inf")), ("svh", 0.0)])
def test_useless_scales_are_refused_while_loading(variant: Callable[..., Path], leaf: str, value: float) -> None:
    with (
        pytest.raises(Exl3PackError, match=rf"model\.layers\.1\.mlp\.down_proj\.{leaf}"),
        engine(variant(ODD, poison(leaf, value))),
    ):
        pass


def test_a_head_in_another_dtype_than_the_model_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.default_loader.safetensors_weights_iterator",
        lambda *_, **__: pytest.fail("weights were read"),
    )
    with (
        pytest.raises(Exl3PackError, match=r"lm_head: found head_dtype torch\.float16 .*--hf-overrides"),
        engine(PACKS / ODD, hf_overrides={"head_dtype": "float16"}),
    ):
        pass


def test_tensors_that_no_module_asks_for_are_refused_with_samples(variant: Callable[..., Path]) -> None:
    folder = variant(ODD, config=lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(Exl3PackError, match=r"model\.layers\.1\."), engine(folder):
        pass


def test_a_pooling_model_does_without_the_head(variant: Callable[..., Path]) -> None:
    """vLLM builds it, moves it to the meta device and leaves it out of the model."""
    folder = variant(ODD)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)  # vLLM pools nothing without one
    with engine(folder, runner="pooling", convert="embed", skip_tokenizer_init=False) as llm:
        (output,) = llm.embed([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
        assert torch.tensor(output.outputs.embedding).norm() == pytest.approx(1, abs=1e-3)
    model = runtime_diagnostics()["models"][-1]
    assert model["pack"] == str(folder) and model["head_bits"] is None


def test_dummy_weights_need_no_loader() -> None:
    with engine(PACKS / ODD, load_format="dummy") as llm:
        assert len(generate(llm, [[1, 2, 3]], 4)[0]) == 4


def leave_copies_beside(tensors: Tensors) -> None:
    """What conversions leave behind: a dense copy of an EXL3 module, and alignment filler."""
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.full((256, 320), 7.0)
    tensors["__align_pad__.0.1"] = torch.zeros(96, dtype=torch.uint8)


def test_tensors_under_a_skip_rule_do_not_reach_the_model(variant: Callable[..., Path]) -> None:
    ids, logits = golden_logits(ODD)
    with engine(variant(ODD, leave_copies_beside)) as llm:
        assert relative_error(logits_of(llm, ids), logits) <= 1e-3


def test_what_must_be_compiled_is_prepared_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[tuple[int, ...], int]] = []
    choice = backends.select("linear", "cpu", linear_reference)
    preparing = replace(choice.backend, prepare=lambda layers, device: prepared.extend(layers))
    monkeypatch.setitem(backends._choices, ("linear", "cpu"), replace(choice, backend=preparing))
    with engine(PACKS / ODD) as llm:
        layers = [layer for layer in model_of(llm).modules() if hasattr(layer, "trellis")]
        wanted = {(tuple(layer.quant_method.shards), layer.quant_method.layout.input_width) for layer in layers}
    assert set(prepared) == wanted and len(prepared) == len(wanted) == 5
