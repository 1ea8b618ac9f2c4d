"""The packs that this project writes: readable by safetensors and by its own reader, and laid out like exllamav3's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_exl3.demo.quantize import Recipe, quantize_model, total_weights
from vllm_exl3.demo.smollm2 import DenseModel, hugging_face_config, hugging_face_tensors
from vllm_exl3.demo.tokenizer import tokenizer_files
from vllm_exl3.pack import Pack
from vllm_exl3.pack.bfloat16 import to_bfloat16
from vllm_exl3.pack.check import check
from vllm_exl3.pack.stored import Codebook
from vllm_exl3.tools.pack_writer import PackTensor, write_pack, write_safetensors
from vllm_exl3.tools.random_pack import write_random_pack

SMALL = {"hidden": 192, "intermediate": 320, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 64, "vocab": 200}


def random_encoder(weight: np.ndarray, half_bits: int, codebook: Codebook, progress: Any) -> SimpleNamespace:
    """Random bits instead of an encoding, as large as the real one."""
    rows, columns = weight.shape
    words = np.random.default_rng(rows).integers(0, 65536, (rows // 16, columns // 16, half_bits * 8), np.uint16)
    scale = (np.abs(weight).sum(0) > 0).astype(np.float16)
    for done in (1, 2, 3):
        progress(done, 3)
    return SimpleNamespace(trellis=words, suh=np.ones(rows, np.float16), svh=scale)


@given(values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32)))
def test_bfloat16_rounds_to_the_nearest(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    bits = to_bfloat16(exact)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    below = (np.uint32(0xFFFF0000) & exact.view(np.uint32)).view(np.float32)
    above = ((np.uint32(0xFFFF0000) & exact.view(np.uint32)) + np.uint32(0x10000)).view(np.float32)
    best = np.minimum(np.abs(below.astype(np.float64) - exact), np.abs(above.astype(np.float64) - exact))
    assert np.all(np.abs(back.astype(np.float64) - exact) <= best)


def test_a_tensor_of_another_size_than_described_is_refused(tmp_path: Path) -> None:
    tensor = PackTensor("x", "F16", (4, 4), lambda: np.zeros((4, 3), np.float16))
    with pytest.raises(ValueError, match=r"x: made 12 values"):
        write_safetensors(tmp_path / "x.safetensors", [tensor])


def test_safetensors_reads_back_what_was_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    values = {"a": np.arange(3, dtype=np.int32), "b": np.ones((2, 5), np.float16), "c": np.array(7, np.int64)}
    codes = {"a": "I32", "b": "F16", "c": "I64"}
    tensors = [PackTensor(name, codes[name], array.shape, lambda array=array: array) for name, array in values.items()]
    write_safetensors(tmp_path / "x.safetensors", tensors)
    back = safetensors.load_file(tmp_path / "x.safetensors")
    assert back.keys() == values.keys()
    assert all(np.array_equal(back[name], array) and back[name].shape == array.shape for name, array in values.items())


def test_a_failed_write_leaves_the_old_pack_and_no_litter(tmp_path: Path) -> None:
    write_random_pack(tmp_path / "pack", **SMALL)

    def fail() -> np.ndarray:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_pack(tmp_path / "pack", config={}, quantization={}, tensors=[PackTensor("x", "F16", (1,), fail)])
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]
    check(Pack.open(tmp_path / "pack"))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 200_000}, {"head_bits": 16}, {"tie": True}])
def test_random_packs_pass_the_checks(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    pack = Pack.open(write_random_pack(tmp_path / "pack", architecture=architecture, **SMALL, **options))
    check(pack)
    assert len(pack.linears) == 7 * SMALL["layers"] + (options.get("head_bits") != 16)
    query = pack.linears["model.layers.0.self_attn.q_proj"]
    assert (query.in_features, query.out_features, query.bits) == (256, 256, 4)


def test_random_packs_have_routed_experts(tmp_path: Path) -> None:
    folder = write_random_pack(tmp_path / "pack", **SMALL, architecture="Qwen3MoeForCausalLM", experts=5, top_k=2)
    pack = Pack.open(folder)
    check(pack)
    assert [len(group.members) for group in pack.experts.values()] == [5] * SMALL["layers"]
    assert len(pack.linears) == (4 + 3 * 5) * SMALL["layers"] + 1
    first, second = (pack.linears[f"model.layers.0.mlp.experts.{number}.up_proj"] for number in range(2))
    assert (first.in_features, first.out_features) == (256, 384)
    assert first.trellis != second.trellis


@pytest.mark.parametrize(("architecture", "experts"), [("Qwen3MoeForCausalLM", 0), ("LlamaForCausalLM", 4)])
def test_experts_go_with_a_moe_architecture(tmp_path: Path, architecture: str, experts: int) -> None:
    with pytest.raises(ValueError, match=f"{architecture} with {experts} experts"):
        write_random_pack(tmp_path / "pack", **SMALL, architecture=architecture, experts=experts)


def test_bits_and_codebook_may_differ_by_module(tmp_path: Path) -> None:
    folder = write_random_pack(
        tmp_path / "pack",
        **SMALL,
        bits=lambda key: 2.5 if "gate" in key else 3,
        codebook=lambda key: "mul1" if "gate" in key or key == "lm_head" else "3inst",
    )
    linears = Pack.open(folder).linears
    gate, up = (linears[f"model.layers.1.mlp.{name}_proj"] for name in ("gate", "up"))
    assert (gate.half_bits, gate.codebook) == (5, Codebook.MUL1)
    assert (up.half_bits, up.codebook) == (6, Codebook.INST3)


def test_random_packs_are_reproducible(tmp_path: Path) -> None:
    first, second, other = (
        (write_random_pack(tmp_path / name, **SMALL, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == second
    assert first != other


def test_the_demo_writes_a_pack_like_exllamav3_does(
    tmp_path: Path, metadata: dict[str, Any], stored: dict[str, np.ndarray]
) -> None:
    model = DenseModel(metadata, hugging_face_config(metadata), hugging_face_tensors(metadata, stored))
    seen: dict[str, float] = {}
    folder = quantize_model(
        tmp_path / "pack",
        model,
        recipe=Recipe(),
        encode=random_encoder,
        extra_files=tokenizer_files(metadata),
        progress=lambda weights, key: seen.update({key: seen.get(key, 0) + weights}),
    )

    pack = Pack.open(folder)
    check(pack)
    assert len(seen) == len(pack.linears) == 15
    assert sum(seen.values()) == pytest.approx(total_weights(model))
    down, head = pack.linears["model.layers.0.mlp.down_proj"], pack.linears["lm_head"]
    assert (down.in_features, down.out_features, down.bits) == (128, 128, 4)
    assert (head.in_features, head.out_features, head.bits) == (128, 384, 6)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["quant_method"] == "exl3"
    storage = json.loads((folder / "quantization_config.json").read_text())["tensor_storage"]["lm_head"]
    assert (storage["quant_format"], storage["bits_per_weight"], storage["mul1_multiplier"]) == ("exl3", 6, 2212286765)
    assert (folder / "tokenizer.json").exists()
    assert (folder / "chat_template.jinja").exists()
