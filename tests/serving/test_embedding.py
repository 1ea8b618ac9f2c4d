"""Engines with quantized token embeddings: EXL3 row codes, int8 and int4 tables, tied and untied, TP 2."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.conftest import PACKS, Tensors, drop_the_head, golden_logits, relative_error
from tests.serving.engine import PROMPTS, engine, generate, logits_of, model_of
from vllm_exl3 import runtime_diagnostics
from vllm_exl3.ops import backends
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.scaled_rows import dequantize_rows
from vllm_exl3.tools.table_writer import quantize_embedding

ROW_CODED = "qwen3-2.25-mul1-emb4"
ODD = "llama_odd-4.0-mul1"
TIED = "llama_tied-3.0-mul1"
GEMMA = "gemma2-6.0-mcg"
KEY = "model.embed_tokens"


def slow(*values: Any) -> Any:
    """A case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def sixteen_bit_twin(folder: Path, target: Path, width: int) -> Path:
    """The same model with its integer table dequantized, float32 so that nothing is rounded."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "quantization_config.json":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantized_embeddings")
    (target / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(folder)
    codes, scales = tensors.pop(f"{KEY}.qrows"), tensors.pop(f"{KEY}.scales")
    values = dequantize_rows(codes.numpy(), scales.float().numpy(), width)
    tensors[f"{KEY}.weight"] = torch.from_numpy(values).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_row_coded_pack_gives_exllamav3s_logits() -> None:
    ids, logits = golden_logits(ROW_CODED)
    backends.reset_calls()
    with engine(PACKS / ROW_CODED) as llm:
        assert relative_error(logits_of(llm, ids), logits) <= 1e-3
        parameters = dict(model_of(llm).get_submodule(KEY).named_parameters())
    assert {name: (param.dtype, tuple(param.shape)) for name, param in parameters.items()} == {
        "trellis": (torch.int16, (640, 65)),
        "signs": (torch.float16, (1, 256)),
    }
    assert any(op == "embedding" for op, _, _ in backends.calls())
    report = runtime_diagnostics()["models"][-1]
    assert report["embeddings"] == {KEY: "EXL3 row code, K = 4"}
    assert report["bytes"]["embedding"] == 640 * 65 * 2 + 512


def swap_two_rows(tensors: Tensors) -> None:
    first, second = golden_logits(ROW_CODED)[0][:2]
    table = tensors[f"{KEY}.trellis"]
    table[[first, second]] = table[[second, first]]


def flip_one_sign(tensors: Tensors) -> None:
    tensors[f"{KEY}.signs"][0, 17] *= -1


def enlarge_one_scale(tensors: Tensors) -> None:
    row = tensors[f"{KEY}.trellis"][golden_logits(ROW_CODED)[0][3]]
    row[:1] = (row[:1].view(torch.float16) * 1.25).view(torch.int16)


@pytest.mark.parametrize("fault", [flip_one_sign, slow(swap_two_rows), slow(enlarge_one_scale)])
def test_the_bound_catches_a_wrong_row_sign_or_scale(
    variant: Callable[..., Path], fault: Callable[[Tensors], None]
) -> None:
    ids, logits = golden_logits(ROW_CODED)
    with engine(variant(ROW_CODED, fault)) as llm:
        assert relative_error(logits_of(llm, ids), logits) > 1e-3


@pytest.mark.slow
def test_reloading_a_row_coded_table_gives_the_same_logits() -> None:
    ids, _ = golden_logits(ROW_CODED)
    with engine(PACKS / ROW_CODED) as llm:
        before = logits_of(llm, ids)
        layer = model_of(llm).get_submodule(KEY)
        address = layer.trellis.data_ptr()
        layer.trellis.data.zero_()
        assert relative_error(logits_of(llm, ids), before.double().numpy()) > 0.1
        llm.collective_rpc("reload_weights")
        torch.testing.assert_close(logits_of(llm, ids), before, rtol=0, atol=0)
        assert layer.trellis.data_ptr() == address


@pytest.mark.slow
def test_compiled_engines_and_dummy_weights() -> None:
    with engine(PACKS / ROW_CODED) as llm:
        eager = generate(llm, PROMPTS)
    with engine(PACKS / ROW_CODED, enforce_eager=False) as llm:
        assert generate(llm, PROMPTS) == eager
    with engine(PACKS / ROW_CODED, load_format="dummy") as llm:
        assert len(generate(llm, [[1, 2, 3]], 4)[0]) == 4


@pytest.mark.parametrize("bits", [4, slow(8)])
def test_an_integer_table_in_an_exl3_pack_is_its_dequantized_twin_bit_for_bit(bits: int, tmp_path: Path) -> None:
    """The class (Llama) passes neither quantization config nor name to its embedding."""
    quantize_embedding(PACKS / ODD, tmp_path / "pack", bits)
    ids, logits = golden_logits(ODD)
    with engine(tmp_path / "pack") as llm:
        ours = logits_of(llm, ids)
        assert set(dict(model_of(llm).get_submodule(KEY).named_parameters())) == {"qrows", "scales"}
    with engine(sixteen_bit_twin(tmp_path / "pack", tmp_path / "twin", 256)) as llm:
        assert torch.equal(logits_of(llm, ids), ours)
    assert relative_error(ours, logits) < (0.02 if bits == 8 else 0.3)


def test_a_head_tied_to_an_integer_table_gets_its_logits_from_it(variant: Callable[..., Path], tmp_path: Path) -> None:
    source = variant(TIED, drop_the_head, lambda config: config.update(tie_word_embeddings=True))
    ids, _ = golden_logits(TIED)
    quantize_embedding(source, tmp_path / "pack", 8)
    with engine(tmp_path / "pack") as llm:
        ours = logits_of(llm, ids)
        assert not dict(model_of(llm).get_submodule("lm_head").named_parameters())
    with engine(sixteen_bit_twin(tmp_path / "pack", tmp_path / "twin", 256)) as llm:
        torch.testing.assert_close(logits_of(llm, ids), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_pack_s_own_head_serves_a_class_that_multiplies_by_its_quantized_embedding(tmp_path: Path) -> None:
    """Gemma 2 builds no head: the pack's is attached to the embedding, beside the table."""
    quantize_embedding(PACKS / GEMMA, tmp_path / "pack", 8)
    ids, logits = golden_logits(GEMMA)
    with engine(tmp_path / "pack") as llm:
        ours = logits_of(llm, ids)
        names = set(dict(model_of(llm).get_submodule(KEY).named_parameters()))
        assert {"qrows", "scales", "head.trellis"} <= names
    with engine(sixteen_bit_twin(tmp_path / "pack", tmp_path / "twin", 256)) as llm:
        assert torch.equal(logits_of(llm, ids), ours)
    assert relative_error(ours, logits) < 0.02


def cut_rows(tensors: Tensors) -> None:
    tensors[f"{KEY}.trellis"] = tensors[f"{KEY}.trellis"][:600].contiguous()


def poison_sign(tensors: Tensors) -> None:
    tensors[f"{KEY}.signs"][0, 0] = float("nan")


@pytest.mark.parametrize("fault", [cut_rows, poison_sign])
def test_a_table_that_does_not_fit_or_is_no_number_is_refused(
    variant: Callable[..., Path], fault: Callable[[Tensors], None]
) -> None:
    with pytest.raises(Exl3PackError, match=r"embed_tokens"), engine(variant(ROW_CODED, fault)):
        pass


def plain_llama(folder: Path, quantization: dict[str, Any] | None, *, tied: bool) -> Path:
    """A random Llama of 192 channels (one and a half groups of 128), 16-bit or with GPTQ linears."""
    folder.mkdir()
    hidden, mlp, vocabulary = 192, 384, 320
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    tensors = {f"{KEY}.weight": torch.randn((vocabulary, hidden), generator=random).bfloat16()}
    if not tied:
        tensors["lm_head.weight"] = torch.randn((vocabulary, hidden), generator=random).bfloat16() * 0.05
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
        for name, (outputs, inputs) in shapes.items():
            tensors |= linear_tensors(
                f"{prefix}.{name}", inputs, outputs, random, (quantization or {}).get("quant_method")
            )
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def linear_tensors(key: str, inputs: int, outputs: int, random: torch.Generator, method: str | None) -> Tensors:
    """A linear in bfloat16, or in 4 bits and groups of 64 inputs as GPTQ or AWQ stores them."""
    if method is None:
        return {f"{key}.weight": (torch.randn((outputs, inputs), generator=random) * 0.05).bfloat16()}
    shape = (inputs // 8, outputs) if method == "gptq" else (inputs, outputs // 8)
    tensors = {
        f"{key}.qweight": torch.randint(-(2**31), 2**31 - 1, shape, generator=random).int(),
        f"{key}.qzeros": torch.full((inputs // 64, outputs // 8), 0x77777777).int(),
        f"{key}.scales": (torch.rand((inputs // 64, outputs), generator=random) * 0.02 + 0.005).half(),
    }
    return tensors | ({f"{key}.g_idx": (torch.arange(inputs) // 64).int()} if method == "gptq" else {})


@pytest.mark.parametrize(("bits", "tied"), [(4, True), slow(4, False), slow(8, True), slow(8, False)])
def test_a_model_that_is_not_exl3_at_all(bits: int, tied: bool, tmp_path: Path) -> None:
    source = plain_llama(tmp_path / "source", None, tied=tied)
    quantize_embedding(source, tmp_path / "model", bits)
    ids = [1, 5, 9, 300, 319, 2]
    with engine(tmp_path / "model") as llm:
        ours = logits_of(llm, ids)
        assert type(model_of(llm).get_submodule(KEY).quant_method).__name__ == "QuantizedEmbeddingMethod"
    with engine(sixteen_bit_twin(tmp_path / "model", tmp_path / "twin", 192)) as llm:
        theirs = logits_of(llm, ids)
    torch.testing.assert_close(theirs, ours, **({"rtol": 1e-4, "atol": 1e-4} if tied else {"rtol": 0, "atol": 0}))
    with engine(source) as llm:
        assert relative_error(logits_of(llm, ids), ours.double().numpy()) > 1e-4


OTHERS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
}


def lacks_int4_kernel() -> bool:
    """vLLM takes its int4 linears for the CPU for granted; its library for processors without AVX-512 has none."""
    from vllm import _custom_ops

    return hasattr(_custom_ops, "cpu_gemm_wna16") and not hasattr(torch.ops._C, "cpu_gemm_wna16")


@pytest.mark.skipif(lacks_int4_kernel(), reason="vLLM's kernels for this CPU lack cpu_gemm_wna16 (GPTQ and AWQ)")
@pytest.mark.parametrize(
    ("method", "bits", "tied"),
    [("gptq", 4, False), ("awq", 8, False), slow("gptq", 8, True), slow("awq", 4, True)],
)
def test_gptq_and_awq_models_keep_their_linears(method: str, bits: int, tied: bool, tmp_path: Path) -> None:
    """bfloat16 throughout: the table of the twin is rounded to it, as the op rounds."""
    quantize_embedding(plain_llama(tmp_path / "source", OTHERS[method], tied=tied), tmp_path / "model", bits)
    ids = [1, 5, 9, 300, 319, 2]
    with engine(tmp_path / "model", dtype="bfloat16") as llm:
        ours = logits_of(llm, ids)
        linear = model_of(llm).get_submodule("model.layers.0.self_attn.qkv_proj")
        assert method.upper() in type(linear.quant_method).__name__.upper()
        assert type(model_of(llm).get_submodule(KEY).quant_method).__name__ == "QuantizedEmbeddingMethod"
        hidden = linear_output(linear)
    with engine(sixteen_bit_twin(tmp_path / "model", tmp_path / "twin", 192), dtype="bfloat16") as llm:
        theirs = logits_of(llm, ids)
        assert torch.equal(linear_output(model_of(llm).get_submodule("model.layers.0.self_attn.qkv_proj")), hidden)
    # A tied head multiplies blocks of the table, whose sums another order rounds apart.
    torch.testing.assert_close(theirs, ours, **({"rtol": 0.02, "atol": 0.05} if tied else {"rtol": 0, "atol": 0}))


def linear_output(linear: torch.nn.Module) -> torch.Tensor:
    output, _ = linear(torch.linspace(-1, 1, 3 * 192, dtype=torch.bfloat16).view(3, 192))
    return output


def test_a_declaration_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    source = plain_llama(tmp_path / "source", None, tied=False)
    config = json.loads((source / "config.json").read_text())
    config["quantized_embeddings"] = {KEY: {"bits": 5, "rows": 320, "width": 192}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exl3PackError, match="quantized_embeddings"), engine(source):
        pass


def test_a_declared_table_that_fits_no_layer_is_not_served_dense(tmp_path: Path) -> None:
    quantize_embedding(plain_llama(tmp_path / "source", None, tied=False), tmp_path / "model", 8)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantized_embeddings"][KEY]["rows"] = 321
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="qrows"), engine(tmp_path / "model"):
        pass
